"""A gradient sum is divided exactly once, before, by or after its reduction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.core.reduction_plan import ReductionScale, plan_scale

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

ranks = st.integers(1, 4096)
divisors = st.none() | st.floats(0.125, 4096.0, allow_nan=False) | st.integers(1, 4096)


@given(ranks, st.sampled_from(DTYPES), divisors, st.booleans())
def test_the_three_factors_are_the_divisor(
    num_ranks: int, dtype: torch.dtype, divisor: float | None, can_average: bool
) -> None:
    scale = plan_scale(num_ranks, dtype, divisor=divisor, can_average=can_average)
    wanted = num_ranks if divisor is None else divisor
    assert scale.before * (num_ranks if scale.averages else 1) * scale.after == wanted
    # Only half precision divides before, by a power of two; then the backend does not average,
    # nor if it cannot, nor under another divisor.
    assert scale.before == 2.0 ** int(scale.before.hex().partition("p")[2]) >= 1
    assert scale.before == 1 or dtype == torch.float16
    assert not scale.averages or (can_average and divisor is None and dtype != torch.float16)
    # A reduction that divides does all of it.
    scale = plan_scale(num_ranks, dtype, divisor=divisor, can_average=can_average, can_divide=True)
    assert scale == ReductionScale(before=1, averages=True, after=1, total=wanted)


@given(st.integers(0, 12))
def test_half_precision_divides_before_by_about_the_square_root(exponent: int) -> None:
    scale = plan_scale(2**exponent, torch.float16)
    assert scale.before == 2.0 ** ((exponent + 1) // 2)
    assert scale.after == 2.0 ** (exponent // 2)


def test_an_average_by_the_backend_is_all_there_is_to_do() -> None:
    assert plan_scale(6, torch.float32) == ReductionScale(before=1, averages=True, after=1, total=6)


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "each", "mean"),
    [
        (4, torch.float16, 30000.0, 30000.0),  # the plain sum, 120000, is beyond float16
        (8, torch.float16, 30.0, 30.0),
        (3, torch.float32, 7.0, 7.0),
        (3, torch.bfloat16, 8.0, 8.0),
    ],
)
def test_a_sum_scaled_as_planned_is_the_mean(
    num_ranks: int, dtype: torch.dtype, each: float, mean: float
) -> None:
    scale = plan_scale(num_ranks, dtype, can_average=False)
    total = torch.zeros(1, dtype=dtype)
    for _ in range(num_ranks):
        total += torch.tensor([each], dtype=dtype) / scale.before
    assert (total / scale.after).item() == mean
