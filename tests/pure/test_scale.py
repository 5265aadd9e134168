"""A gradient sum is divided exactly once, before, by or after its reduction."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.core.reduction import Scale, plan_scale

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

ranks = st.integers(1, 4096)
divisors = st.none() | st.floats(0.125, 4096.0, allow_nan=False) | st.integers(1, 4096)


@given(ranks, st.sampled_from(DTYPES), divisors, st.booleans())
def test_the_three_factors_are_the_divisor(
    num_ranks: int, dtype: torch.dtype, divisor: float | None, averages: bool
) -> None:
    total = float(num_ranks if divisor is None else divisor)
    is_mean = divisor is None
    scale = plan_scale(total, dtype, is_mean=is_mean, averages=averages, divides=False)
    assert scale.before * (scale.divisor or 1) * scale.after == total
    # Only half precision divides before, by a power of two; then the backend does not average,
    # nor if it cannot, nor under another divisor.
    assert scale.before == 2.0 ** int(scale.before.hex().partition("p")[2]) >= 1
    assert scale.before == 1 or dtype == torch.float16
    assert scale.divisor is None or (averages and is_mean and dtype != torch.float16)
    # A reduction that divides does all of it.
    scale = plan_scale(total, dtype, is_mean=is_mean, averages=averages, divides=True)
    assert scale == Scale(1.0, total, 1.0)


def test_half_precision_is_divided_before_by_about_the_root() -> None:
    before = [
        plan_scale(total, torch.float16, is_mean=True, averages=True, divides=False).before
        for total in (1, 2, 7, 12, 64, 128)
    ]
    assert before == [1, 2, 1, 4, 8, 16]
