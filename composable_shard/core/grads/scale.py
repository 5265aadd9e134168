"""By what a gradient is multiplied before, by and after its reduction. Pure arithmetic.

The reduced gradient is ``sum over ranks / divisor``, where the divisor is the number of ranks
unless the user chose another. It may be reached in three places, and must be reached exactly once:
before the reduction (keeps half-precision sums in range), by the reduction itself (an average),
or after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReductionScale:
    """Divide by ``before``, reduce (averaging if ``averages``), divide by ``after``.

    Attributes:
        total: What a sum that is divided but once is divided by.
    """

    before: float
    averages: bool
    after: float
    total: float


def plan_scale(
    num_ranks: int,
    reduce_dtype: torch.dtype,
    *,
    divisor: float | None = None,
    can_average: bool = True,
    can_divide: bool = False,
) -> ReductionScale:
    """Split the division of a gradient sum between before, during and after the reduction.

    Args:
        num_ranks: Ranks that take part in the reduction.
        reduce_dtype: Dtype in which the sum is taken. ``float16`` sums overflow early, so half of
            the division (about the square root, a power of two) is done beforehand.
        divisor: What to divide the sum by; the number of ranks if absent.
        can_average: Whether the backend averages by itself.
        can_divide: Whether the reduction divides by any number, before it rounds; it then divides
            by ``total``.
    """
    total = float(num_ranks) if divisor is None else float(divisor)
    if can_divide:
        return ReductionScale(1.0, True, 1.0, total)
    if reduce_dtype == torch.float16:
        before = 1.0
        while before * before < total and total % (2 * before) == 0:
            before *= 2
        return ReductionScale(before, False, total / before, total)
    if divisor is None and can_average:
        return ReductionScale(1.0, True, 1.0, total)
    return ReductionScale(1.0, False, total, total)
