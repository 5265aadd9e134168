"""Ranks that send, as those on other hosts do, train as those that read each other's memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshes import test_hybrid as hybrid
from meshes import test_reshard_to_fewer as fewer
from near import Apart, readable
from subclasses.test_two_tensors import train_parity_on_ranks
from training import programs
from training.cases import reproducible
from training.test_precision import FOLDED, NO_SYNC, POLICIES, SYNC
from training.test_training import TREES, Training, train, trainings

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import run_ranks
from composable_shard.testing.strategies import AccumulationStep

__all__ = ["readable"]
pytestmark = pytest.mark.usefixtures("readable")

TIMEOUT = 30.0


@pytest.mark.parametrize("apart", [None, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tree", list(TREES))
def test_trees(tree: str, ranks: int, apart: int | None) -> None:
    case = Training(TREES[tree], num_steps=2)
    differences = run_ranks(Apart(train, apart), ranks, case, timeout=TIMEOUT)
    assert differences == [[]] * ranks


@reproducible(20)
@given(trainings(), st.sampled_from([None, 1, 2]))
def test_any_tree(case: tuple[Training, int], apart: int | None) -> None:
    training, ranks = case
    differences = run_ranks(Apart(train, apart), ranks, training, timeout=TIMEOUT)
    assert differences == [[]] * ranks


@pytest.mark.parametrize(("steps", "ranks"), [(SYNC, 2), (NO_SYNC, 2), (FOLDED, 3)])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_policies(policy: str, steps: tuple[AccumulationStep, ...], ranks: int) -> None:
    program = programs.Program(steps, policy=POLICIES[policy])
    differences = run_ranks(Apart(programs.follow), ranks, program, timeout=TIMEOUT)
    assert differences == [[]] * ranks


@pytest.mark.parametrize("extents", [(2, 2), (1, 3)])
def test_hybrid_meshes(extents: tuple[int, int]) -> None:
    steps: tuple[hybrid.Step, ...] = ("sync", "step", "no_all_reduce", "no_sync", "sync", "step")
    ranks = extents[0] * extents[1]
    program = hybrid.Program(steps, ((hybrid.ALL,) * ranks,) * len(steps), extents)
    differences = run_ranks(Apart(hybrid.follow), ranks, program, timeout=TIMEOUT)
    assert differences == [[]] * ranks


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
def test_parts_that_neighbours_keep(param_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    seen = [
        run_ranks(run, 4, 2, policy, timeout=TIMEOUT) for run in (fewer.train, Apart(fewer.train))
    ]
    assert seen[0] == seen[1]
    if param_dtype is None:
        assert seen[1] == [[]] * 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_subclasses(ranks: int) -> None:
    run_ranks(Apart(train_parity_on_ranks), ranks, True, timeout=60)
