"""Gradients accumulated in any order, with and without reduction, are those of the oracle.

After every step the value and the placement of every ``.grad`` is compared: ``None``, partial
(accumulated, not reduced) or sharded.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from nets import full
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks
from composable_shard.testing.strategies import (
    AccumulationStep,
    accumulation_programs,
    num_ranks,
    uses,
)
from training.cases import reproducible
from training.programs import NUM_PARAMS, TREE, Program, assert_same
from training.trees import build, inputs_for, shard


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


# By hand ------------------------------------------------------------------------------------

PROGRAMS: list[tuple[AccumulationStep, ...]] = [
    ("no_sync", "sync", "step", "zero_grad", "sync"),
    ("no_sync", "no_sync", "sync", "step"),
    ("sync", "no_sync", "sync", "step"),
    ("sync", "sync", "no_sync", "no_sync", "sync", "step", "sync"),
    ("no_sync", "zero_grad", "sync", "step"),
    ("no_sync", "reset", "sync", "step"),
    ("reset", "sync", "reset", "step"),
    ("sync", "no_sync", "zero_grad", "no_sync", "sync", "step"),
    ("no_sync", "eval", "sync", "eval", "step", "eval"),
    ("no_sync", "step", "sync", "step", "zero_grad", "sync"),
    ("step", "zero_grad", "zero_grad", "eval", "eval"),
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("steps", PROGRAMS, ids=" ".join)
def test_this_program_gives_the_gradients_of_the_oracle(
    steps: tuple[AccumulationStep, ...], ranks: int
) -> None:
    assert_same(Program(steps), ranks)
    assert_same(Program(steps, reshard_after_backward=False), ranks)


ALL, FIRST = (True,) * NUM_PARAMS, (True,) + (False,) * (NUM_PARAMS - 1)
ONE_GROUP = (True, True, True, False, False, False)
OTHER_GROUP = (True, False, False, True, True, True)


@pytest.mark.parametrize("skips_unused", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_microbatches_may_use_different_groups(ranks: int, skips_unused: bool) -> None:
    used = [(of_step,) * ranks for of_step in (ONE_GROUP, OTHER_GROUP, FIRST, ALL)]
    steps: tuple[AccumulationStep, ...] = ("no_sync", "no_sync", "sync", "sync")
    assert_same(Program(steps, tuple(used), skips_unused=skips_unused), ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_group_that_one_ranks_loss_does_not_reach_gets_the_exact_mean(ranks: int) -> None:
    one_rank_differs = (FIRST,) + (ALL,) * (ranks - 1)
    used = (one_rank_differs, one_rank_differs[::-1], (FIRST,) * ranks)
    assert_same(Program(("sync", "sync", "sync"), used), ranks)
    assert_same(Program(("no_sync", "no_sync", "sync"), used), ranks)


def gradients_without_use() -> list[bool]:
    model = shard(build(TREE), TREE)
    model(inputs_for(0, dist.get_rank()), FIRST).sum().backward()
    return [param.grad is None for param in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_parameter_that_no_rank_uses_keeps_no_gradient(ranks: int) -> None:
    assert run_ranks(gradients_without_use, ranks) == [[False] + [True] * 5] * ranks


def clamped_sums() -> tuple[int, int, float]:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    calls = []

    def clamp(reduced: torch.Tensor) -> None:
        calls.append(reduced.numel())
        reduced.clamp_(max=3.0)

    model.set_all_reduce_hook(clamp)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    before = len(calls)
    model(torch.ones(2, 4)).sum().backward()
    return before, len(calls), float(full(model.weight.grad)[0, 0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_waits_for_the_reduction_on_any_number_of_ranks(ranks: int) -> None:
    assert run_ranks(clamped_sums, ranks, timeout=60) == [(0, 1, 3.0)] * ranks


def sum_of_small() -> float:
    """One and eight times 2 ** -9, each of which bf16 would lose beside one."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    values = [1.0, *[2**-9] * 8]
    for place, value in enumerate(values):
        model.set_requires_gradient_sync(place == len(values) - 1)
        model(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
    return float(full(model.weight.grad))


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_are_as_precise_on_any_number_of_ranks(ranks: int) -> None:
    assert run_ranks(sum_of_small, ranks, timeout=60) == [1.015625] * ranks
