"""Gradients accumulated in any order, with and without reduction, are those of the oracle.

After every step the value and the placement of every ``.grad`` is compared: ``None``, partial
(accumulated, not reduced) or sharded.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from training.cases import reproducible
from training.programs import (
    NUM_PARAMS,
    Program,
    assert_same,
    programs,
    programs_of_differing_ranks,
)


@reproducible(60)
@given(programs(max_steps=8))
def test_any_program_gives_the_gradients_of_the_oracle(case: tuple[Program, int]) -> None:
    assert_same(*case)


@reproducible(50)
@given(programs_of_differing_ranks(max_steps=6))
def test_ranks_that_use_different_parameters_get_the_exact_mean(
    case: tuple[Program, int],
) -> None:
    assert_same(*case)


ALL, FIRST = (True,) * NUM_PARAMS, (True,) + (False,) * (NUM_PARAMS - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_group_that_one_ranks_loss_does_not_reach_gets_the_exact_mean(ranks: int) -> None:
    one_rank_differs = (FIRST,) + (ALL,) * (ranks - 1)
    used = (one_rank_differs, one_rank_differs[::-1], (FIRST,) * ranks)
    assert_same(Program(("sync", "sync", "sync"), used), ranks)
    assert_same(Program(("no_sync", "no_sync", "sync"), used), ranks)
