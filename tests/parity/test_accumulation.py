"""Gradients accumulated in any order, with and without reduction, are those of the oracle.

After every step the value and the placement of every ``.grad`` is compared: ``None``, partial
(accumulated, not reduced) or sharded.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from composable_shard import FSDPModule
from composable_shard.testing import run_ranks
from composable_shard.testing.strategies import (
    AccumulationStep,
    accumulation_programs,
    num_ranks,
    uses,
)
from parity.cases import num_params, reproducible
from parity.compare import Comparison
from parity.models import ParamSpec, Tree, TreeSpec, build, inputs_for, shard
from parity.oracle import Unsharded

TREE = TreeSpec(
    (ParamSpec((3,)),),
    (
        TreeSpec((ParamSpec((5, 2)), ParamSpec((257, 193)))),
        TreeSpec((ParamSpec((3, 5), dim=1), ParamSpec((4,), trainable=False), ParamSpec((6,)))),
    ),
)
NUM_PARAMS = num_params(TREE)
Used = tuple[bool, ...]


@dataclass(frozen=True)
class Program:
    """What to do, and which parameters each forward uses.

    Attributes:
        steps: What to do.
        used: For each step, for each rank, which parameters are used (the first one always is).
        reshard_after_forward: As for ``fully_shard``.
        reshard_after_backward: As for ``set_reshard_after_backward``.
        skips_unused: Whether groups of which nothing is used do not run at all.
    """

    steps: tuple[AccumulationStep, ...]
    used: tuple[tuple[Used, ...], ...] = ()
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    skips_unused: bool = False

    def used_at(self, step: int, rank: int) -> Used | None:
        return (True, *self.used[step][rank][1:]) if self.used else None


def follow(program: Program) -> list[str]:
    """Follow the program with both models on this rank; return what differs."""
    model = build(TREE)
    for module in model.modules():
        if isinstance(module, Tree):
            module.skips_unused = program.skips_unused
    oracle = Unsharded(model)
    shard(model, TREE, reshard_after_forward=program.reshard_after_forward)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(program.reshard_after_backward)
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for place, step in enumerate(program.steps):
        x = inputs_for(place, dist.get_rank())
        used = program.used_at(place, dist.get_rank())
        if step in ("sync", "no_sync"):
            with contextlib.nullcontext() if step == "sync" else model.no_sync():
                losses = [m(x, used).square().mean() for m in (model, oracle)]
                for loss in losses:
                    loss.backward()
            oracle.after_backward(sync=step == "sync")
            comparison.tensor(f"step {place}: loss", *losses)
        elif step == "zero_grad":
            (model if place % 2 else optimizers[0]).zero_grad()
            oracle.clear()
        elif step == "step":
            optimizers[0].step()
            oracle.step(optimizers[1])
        elif step == "reset":
            model.reset_iter_state()
            oracle.drop_unreduced()
        elif step == "eval":
            with torch.no_grad():
                comparison.tensor(f"step {place}: output", model(x, used), oracle(x, used))
        comparison.grads(f"step {place} ({step})")
        comparison.params(f"step {place} ({step})")
        if step == "step" and oracle.has_folded:
            comparison.exact = False
    return comparison.differences


def assert_same(program: Program, ranks: int) -> None:
    assert run_ranks(follow, ranks, program) == [[]] * ranks


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


@reproducible(80)
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


@reproducible(60)
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
