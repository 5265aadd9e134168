"""A rank that sits out a module trains as if its batch had nothing for it."""

from __future__ import annotations

from hypothesis import given, settings

from composable_shard.testing import run_ranks
from uneven.programs import Program, check, programs


@settings(deadline=None)
@given(program=programs())
def test_ranks_that_sit_out_modules_train_like_one_process(program: Program) -> None:
    run_ranks(check, program.num_ranks, program, timeout=60)
