"""Any tree, sharded in any way, follows any training program as the unsharded one does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from near import kept_apart

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import Step, run_on_ranks
from composable_shard.testing.strategies import policies
from training.cases import Case, UsedAt, cases, reproducible
from training.iterations import iterate
from training.trees import NUM_PARAMS, TREE


@reproducible(80)
@given(cases())
def test_any_tree_follows_any_program(case: Case) -> None:
    case.check()


@reproducible(40)
@given(cases(differs=True))
def test_any_tree_of_which_ranks_use_different_parameters_follows_any_program(case: Case) -> None:
    case.check()


@reproducible(20)
@given(cases(dtypes=(torch.float32, torch.bfloat16, torch.float64, torch.int64)))
def test_any_tree_of_mixed_dtypes_follows_any_program(case: Case) -> None:
    # A group accumulates in its widest dtype, which the oracle does not know.
    wide = torch.float64 if "accumulate" in case.program else None
    case.check(policy=MixedPrecisionPolicy(reduce_dtype=wide))


@reproducible(60)
@given(cases() | cases(differs=True), policies(any_inputs=True))
def test_any_tree_follows_any_program_under_any_policy(
    case: Case, policy: MixedPrecisionPolicy
) -> None:
    case.options["policy"] = policy
    case.check()


@pytest.mark.usefixtures("sharing")
@reproducible(20)
@given(cases(), st.sampled_from([None, 1, 2]))
def test_any_tree_follows_any_program_on_ranks_that_send(case: Case, apart: int | None) -> None:
    case.check(within=partial(kept_apart, apart))


ALL, FIRST = (True,) * NUM_PARAMS, (True,) + (False,) * (NUM_PARAMS - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("before", ["backward", "accumulate"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_group_that_one_ranks_loss_does_not_reach_gets_the_exact_mean(
    before: Step, ranks: int, dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(grad_dtype=dtype)
    one_rank_differs = (FIRST,) + (ALL,) * (ranks - 1)
    loss = UsedAt((one_rank_differs, one_rank_differs[::-1], (FIRST,)))
    Case(TREE, [before, before, "backward"], (ranks,)).check(loss=loss, policy=policy)


def test_a_backward_without_a_group_reduces_what_that_has_accumulated() -> None:
    loss = UsedAt(((ALL,), (FIRST,)), skips_unused=True)
    Case(TREE, ["accumulate", "backward"]).check(loss=loss)


def test_many_iterations_train_exactly_and_leave_nothing_behind() -> None:
    """The short form of ``tests/long``."""
    for found, (before, after) in run_on_ranks(iterate, 2, 24, (12, 24), timeout=120):
        assert found == []
        assert after.open_files == before.open_files
        assert after.process_groups == before.process_groups
        assert after.own_objects == before.own_objects
        assert after.tensors == before.tensors
