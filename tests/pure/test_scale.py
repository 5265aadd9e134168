"""A gradient sum is divided exactly once, before, by or after its reduction."""

from __future__ import annotations

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
