"""Ranks that do not do the same, in any order, train like one process; planted faults are seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from faults.poisoned import Fault, Plant, planted
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import nn

from composable_shard import FSDPModule, sit_out
from composable_shard.testing import RankError, run_ranks
from composable_shard.train.weighing import Weighing
from uneven.programs import Program, StepSpec, TowerSpec, Turn, check, programs

NUM_PARTS = 30
NUM_EXAMPLES = 8 if os.environ.get("BRIEF_EXAMPLES") else 100
# The same programs in every short run, others in every long one.
TIMES = int(os.environ.get("PARITY_EXAMPLES", "1"))
START = 0 if TIMES == 1 else int(time.time())


def generated(part: int, count: int, do: Callable[[Program], None]) -> None:
    """Do something with each of ``count`` programs, the same for the same ``part``."""

    @seed(part)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def each(program: Program) -> None:
        do(program)

    each()


def run(program: Program) -> None:
    run_ranks(check, program.num_ranks, program, timeout=60)


@pytest.mark.brief(1)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_ranks_that_do_not_do_the_same_train_like_one_process(part: int) -> None:
    """Sitting out, weighing, failing, clipping, clearing and synchronizing as drawn."""
    generated(START + part, NUM_EXAMPLES * TIMES, run)


# Programs that were wrong once --------------------------------------------------------------------


def program(*towers: TowerSpec, turns: list[Turn], as_whole: bool = False) -> Program:
    """Return a program whose first step all ranks compute, as each of ``turns`` is one besides."""
    num_ranks = len(turns[0].runs)
    calls = (True,) * sum(tower.num_calls for tower in towers)
    known = Turn((calls,) * num_ranks, (True,) * num_ranks)
    steps = tuple(StepSpec((turn,)) for turn in (known, *turns))
    return Program(num_ranks, 1, towers, steps, None, False, as_whole)


PLAIN = TowerSpec(1, True, False, False, "", is_frozen=False, num_calls=1)
FROZEN_TWICE = replace(PLAIN, is_frozen=True, num_calls=2)
LAST_OUT = Turn(((True, False), (True, True)), (True, True))
IN_CHECKPOINT = [
    replace(PLAIN, num_blocks=3, has_groups=True, checkpoints=kind)
    for kind in ("reentrant", "non-reentrant")
]
NO_BATCH = Turn((None, (True,)), (True, True))


KNOWN = {
    "freed after the first call, and read again": program(FROZEN_TWICE, turns=[LAST_OUT]),
    **{
        f"no batch, {one.checkpoints}": program(replace(one, is_group=False), turns=[NO_BATCH])
        for one in IN_CHECKPOINT
    },
    **{
        f"no batch, inner groups, {one.checkpoints}": program(
            replace(one, has_inner_groups=True), turns=[NO_BATCH], as_whole=True
        )
        for one in IN_CHECKPOINT
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_program_that_was_wrong_once(name: str) -> None:
    run(KNOWN[name])


# Faults -------------------------------------------------------------------------------------------


def sitting_out_by(fault: Callable[[nn.Module], torch.Tensor]) -> Plant:
    return Plant(lambda: mock.patch("uneven.programs.sit_out", fault))


def sharded_in(module: nn.Module) -> list[nn.Module]:
    """Return the innermost sharded modules."""
    inner = [one for child in module.children() for one in sharded_in(child)]
    return inner or [module] * isinstance(module, FSDPModule)


def sit_out_backwards(module: nn.Module) -> torch.Tensor:
    return torch.stack([sit_out(one) for one in reversed(sharded_in(module))]).sum()


def sit_out_but_one(module: nn.Module) -> torch.Tensor:
    return torch.stack([torch.zeros(()), *map(sit_out, sharded_in(module)[1:])]).sum()


@torch.no_grad()
def sit_out_of_forward(module: nn.Module) -> torch.Tensor:
    return sit_out(module)


FAULTS: dict[str, Fault | Plant] = {
    "the mean over ranks": Fault(Weighing, "_divide", "param.mesh.num_ranks if", "1 if"),
    "a forgotten rank": Fault(Weighing, "end", "dist.ReduceOp.SUM", "dist.ReduceOp.MAX"),
    "a forgotten microbatch": Fault(Weighing, "add", "self._sums +=", "self._sums ="),
    "a loss of the wrong sign": Fault(Weighing, "add", "weight * mean", "-weight * mean"),
    "another order": sitting_out_by(sit_out_backwards),
    "a group that is passed over": sitting_out_by(sit_out_but_one),
    "a backward that is passed over": sitting_out_by(sit_out_of_forward),
}


def run_with(name: str, program: Program) -> None:
    with planted(FAULTS[name]):
        check(program)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    seen: list[RankError] = []

    def look(program: Program) -> None:
        if seen or len(program.steps) < 3:
            return
        try:
            run_ranks(run_with, program.num_ranks, name, program, timeout=15)
        except RankError as error:
            seen.append(error)

    generated(0, 500, look)
    assert seen
