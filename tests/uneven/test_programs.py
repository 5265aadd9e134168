"""Ranks that do not do the same, in any order, train like one process; planted faults are seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from faults.poisoned import Fault, Plant, planted
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import nn

from composable_shard import FSDPModule, sit_out
from composable_shard.testing import RankError, run_ranks
from composable_shard.train.weighing import Weighing
from uneven.programs import Program, check, programs

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


# Faults -------------------------------------------------------------------------------------------


def sitting_out_by(fault: Callable[[nn.Module], torch.Tensor]) -> Plant:
    return Plant(lambda: mock.patch("uneven.programs.sit_out", fault))


def sharded_in(module: nn.Module) -> list[nn.Module]:
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
