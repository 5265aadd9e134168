"""Gradients accumulated in any order, with and without reduction, are those of the oracle.

After every step the value and the placement of every ``.grad`` is compared: ``None``, partial
(accumulated, not reduced) or sharded.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.testing.strategies import accumulation_programs, num_ranks, uses
from training.cases import reproducible
from training.programs import NUM_PARAMS, Program, assert_same


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, int]:
    """Programs in which all ranks use the same parameters."""
    ranks = draw(num_ranks())
    steps = draw(accumulation_programs(max_steps=8))
    used = draw(uses(len(steps), NUM_PARAMS))
    program = Program(
        tuple(steps),
        tuple((of_step,) * ranks for of_step in used),
        draw(st.sampled_from([None, True, False])),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    return program, ranks


@reproducible(60)
@given(programs())
def test_any_program_gives_the_gradients_of_the_oracle(case: tuple[Program, int]) -> None:
    assert_same(*case)


@st.composite
def programs_of_differing_ranks(draw: st.DrawFn) -> tuple[Program, int]:
    """Programs in which each rank uses parameters of its own choice."""
    ranks = draw(st.integers(2, 4))
    # Unreduced gradients are a matter of each rank, so neither a step nor a reset is theirs alone.
    steps = draw(accumulation_programs(max_steps=6, without=("step", "reset")))
    used = tuple(draw(uses(ranks, NUM_PARAMS)) for _ in steps)
    return Program(tuple(steps), used, draw(st.sampled_from([None, True, False]))), ranks


@reproducible(50)
@given(programs_of_differing_ranks())
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
