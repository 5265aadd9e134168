"""Strategies for what a training loop does, and for which rank uses what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hypothesis import strategies as st

from composable_shard.testing.programs import STEPS, Step

__all__ = ["AccumulationStep", "accumulation_programs", "training_programs", "uses"]

AccumulationStep = Literal["no_sync", "sync", "zero_grad", "step", "reset", "eval"]
"""What a training loop may do next: a backward without or with reduction, clear, take an optimizer
step, call ``reset_iter_state``, or run a forward under ``no_grad``."""


def uses(num_ranks: int, num_uses: int) -> st.SearchStrategy[tuple[tuple[bool, ...], ...]]:
    """For each rank, which of ``num_uses`` things (parameters, blocks) it uses.

    Shrinks to everything used by every rank.

    Example:
        >>> from hypothesis import find
        >>> find(uses(2, 2), lambda used: not used[1][0])
        ((True, True), (False, True))
    """
    one_rank = st.tuples(*[st.sampled_from([True, False])] * num_uses)
    return st.tuples(*[one_rank] * num_ranks)


def training_programs(
    max_steps: int = 8, without: Sequence[Step] = ()
) -> st.SearchStrategy[list[Step]]:
    """Programs for ``assert_trains_like_unsharded``; they shrink to the fewest and plainest steps.

    Args:
        max_steps: Length of the longest program.
        without: Steps to leave out.

    Example:
        >>> from hypothesis import find
        >>> find(training_programs(), lambda steps: "checkpoint" in steps and len(steps) > 1)
        ['backward', 'checkpoint']
        >>> find(training_programs(), lambda steps: "accumulate" in steps and "step" in steps)
        ['step', 'accumulate']
    """
    left = [step for step in STEPS if step not in without]
    return st.lists(st.sampled_from(left), min_size=1, max_size=max_steps)


def accumulation_programs(
    max_steps: int = 8, without: Sequence[AccumulationStep] = ()
) -> st.SearchStrategy[list[AccumulationStep]]:
    """Sequences of what a training loop does to gradients, in any order.

    Args:
        max_steps: Length of the longest sequence.
        without: Steps to leave out.

    Example:
        >>> from hypothesis import find
        >>> find(accumulation_programs(), lambda steps: "zero_grad" in steps and len(steps) > 1)
        ['sync', 'zero_grad']
    """
    every: list[AccumulationStep] = ["sync", "no_sync", "zero_grad", "step", "reset", "eval"]
    left = [step for step in every if step not in without]
    return st.lists(st.sampled_from(left), min_size=1, max_size=max_steps)
