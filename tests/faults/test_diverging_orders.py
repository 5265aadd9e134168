"""With ``COMPOSABLE_SHARD_CHECK=1``, ranks that come to different collectives all raise."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, gradient_differences
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training.trees import TREE, build, inputs_for

from composable_shard import RankMismatchError, fully_shard
from composable_shard.testing import run_ranks, shard_tree
from faults.breaking import mesh_over

CHECK_VARIABLE = "COMPOSABLE_SHARD_CHECK"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def branches(hybrid: bool = False) -> nn.Module:
    os.environ[CHECK_VARIABLE] = "1"
    try:
        mesh = None
        if hybrid:
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = Branches()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    finally:
        del os.environ[CHECK_VARIABLE]


X = torch.ones(2, 4)


def skips_in_the_middle(model: nn.Module, differs: bool) -> None:
    model(X, (0, 2) if differs else (0, 1, 2)).sum().backward()


def skips_the_last_one(model: nn.Module, differs: bool) -> None:
    with torch.no_grad():
        model(X, (0, 1) if differs else (0, 1, 2))


def runs_in_another_order(model: nn.Module, differs: bool) -> None:
    model(X, (1, 0, 2) if differs else (0, 1, 2))


def runs_once_more(model: nn.Module, differs: bool) -> None:
    loss = model(X, (0, 1, 2)).sum()
    if differs:
        model(X, (0, 1, 2))
    loss.backward()


def has_no_backward(model: nn.Module, differs: bool) -> None:
    loss = model(X, (0, 1, 2)).sum()
    if not differs:
        loss.backward()
    model(X, (0, 1, 2))


def after_a_good_step(act: Callable[[nn.Module, bool], None]) -> tuple[str, str]:
    model = branches()
    model(X, (0, 1, 2)).sum().backward()
    return said_by(act, model)


def at_once(act: Callable[[nn.Module, bool], None], hybrid: bool = False) -> tuple[str, str]:
    return said_by(act, branches(hybrid))


def said_by(act: Callable[[nn.Module, bool], None], model: nn.Module) -> tuple[str, str]:
    try:
        act(model, dist.get_rank() == 1)
    except RankMismatchError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def text(step: int, first: str, second: str) -> tuple[str, str]:
    return (
        "RankMismatchError",
        f"Expected the same order of collectives on all ranks, got on rank 0: {first}, "
        f"operation {step}; on rank 1: {second}, operation {step}",
    )


ZERO, ONE, TWO = (f"all-gather of group 'layers.{index}'" for index in range(3))
END = "end of a forward of the root group"
CASES: list[tuple[Callable[[nn.Module, bool], None], tuple[str, str]]] = [
    (skips_in_the_middle, text(2, ONE, TWO)),
    (skips_the_last_one, text(3, TWO, END)),
    (runs_in_another_order, text(1, ZERO, ONE)),
    (runs_once_more, text(5, TWO, ZERO)),
    (has_no_backward, text(5, TWO, ZERO)),
]


@pytest.mark.parametrize(("act", "expected"), CASES, ids=[act.__name__ for act, _ in CASES])
def test_ranks_that_diverge_all_name_the_groups(
    act: Callable[[nn.Module, bool], None], expected: tuple[str, str]
) -> None:
    assert run_ranks(at_once, 2, act, timeout=20) == [expected] * 2


def test_a_group_that_was_gathered_ahead_may_be_skipped() -> None:
    assert run_ranks(after_a_good_step, 2, skips_the_last_one) == [("nothing", "")] * 2


def test_replicas_are_compared_too() -> None:
    expected = text(2, ONE, TWO)
    assert run_ranks(at_once, 2, skips_in_the_middle, True, timeout=20) == [expected] * 2


def one_stays_away() -> tuple[str, str]:
    ranks = dist.new_group(timeout=datetime.timedelta(seconds=1))
    os.environ[CHECK_VARIABLE] = "1"
    try:
        model = fully_shard(nn.Linear(4, 4), mesh=mesh_over(ranks))
    finally:
        del os.environ[CHECK_VARIABLE]
    with torch.no_grad():
        model(X)
    if dist.get_rank() == 1:
        return "gone", ""
    return said_by(lambda one, _: one(X), model)


def test_a_rank_that_does_not_come_is_missed_within_the_time_out() -> None:
    expected = (
        "RankMismatchError",
        "Expected all ranks to reach the all-gather of the root group, operation 3, got no message "
        "of some rank within the time-out; it has ended, or waits elsewhere",
    )
    assert run_ranks(one_stays_away, 2, timeout=20) == [expected, ("gone", "")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_checked_training_equals_that_of_the_oracle() -> None:
    os.environ[CHECK_VARIABLE] = "1"
    try:
        model = build(TREE)
        oracle = Oracle(model)
        shard_tree(model)
    finally:
        del os.environ[CHECK_VARIABLE]
    for step in range(2):
        x = inputs_for(step, dist.get_rank())
        for either in (model, oracle.model):
            either(x).square().mean().backward()
        oracle.take()
    oracle.reduce()
    assert gradient_differences(dict(model.named_parameters()), oracle) == []
