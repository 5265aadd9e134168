"""Training a sharded model gives the losses, gradients and parameters of the unsharded one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable_shard import ShardError, fully_shard
from composable_shard.testing import ParamSpec, Step, TreeSpec, run_ranks, shard_tree
from composable_shard.testing.oracle import MakeOptimizer
from training.cases import OPTIMIZERS, Case
from training.trees import build

ROWS = ParamSpec((3,)), ParamSpec((1, 5)), ParamSpec((2, 3)), ParamSpec((7, 2))
BIG = ParamSpec((301, 701)), ParamSpec((512, 512)), ParamSpec((5,))
INNER = ParamSpec((3, 5), dim=1), ParamSpec((2, 3, 5), dim=-1), ParamSpec((200, 301, 4), dim=1)
TREE = TreeSpec(ROWS, (TreeSpec(BIG), TreeSpec(INNER)))


class Clipped(torch.optim.SGD):
    """Clips before a step, by torch's function."""

    def __init__(self, params: Iterable[nn.Parameter], max_norm: float) -> None:
        super().__init__(params, lr=0.1)
        self.max_norm = max_norm

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.max_norm)
        return super().step(closure)


STEPPED: dict[str, MakeOptimizer] = {
    **OPTIMIZERS,
    "clipped much": partial(Clipped, max_norm=1e-3),
    "clipped little": partial(Clipped, max_norm=1e3),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", STEPPED)
def test_every_optimizer_steps_and_clips_as_unsharded(optimizer: str, ranks: int) -> None:
    program: list[Step] = ["backward", "step", "zero_grad"] * 4
    Case(TREE, program, (ranks,)).check(optimizer=STEPPED[optimizer])


def shards_as_distributed(params: tuple[ParamSpec, ...]) -> list[bool]:
    spec = TreeSpec(params)
    full = [param.detach().clone() for param in build(spec).parameters()]
    model = shard_tree(build(spec))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    same = []
    for param, whole, own in zip(model.parameters(), full, params, strict=True):
        assert isinstance(param, DTensor)
        wanted = distribute_tensor(whole, mesh, [Shard(own.dim % whole.ndim)])
        assert param.placements == wanted.placements
        same.append(torch.equal(param.to_local(), wanted.to_local()))
    return same


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_those_of_distribute_tensor(ranks: int) -> None:
    params = (*ROWS, *BIG, *INNER)
    assert run_ranks(shards_as_distributed, ranks, params) == [[True] * len(params)] * ranks


class RunsKeptGraph(torch.autograd.Function):
    """An identity whose backward runs another graph, into a group that is reduced already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.kept[0].backward()
        return grad, None


class LateGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = list[torch.Tensor]()
        inner = RunsKeptGraph.apply(self.first(x), kept)
        out = self.last(inner)
        kept.append(self.last(inner.detach()).sum())
        return out.sum()


@on_ranks(2)
def test_a_gradient_behind_the_reduction_of_its_group_is_refused() -> None:
    model = LateGraph()
    for layer in (model.first, model.last):
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ShardError) as caught:
        model(torch.ones(1, 2)).backward()
    assert str(caught.value) == (
        "Expected all gradients of group 'last' before its reduction, got a gradient later, from "
        "a backward inside this one; run the two one after the other"
    )
