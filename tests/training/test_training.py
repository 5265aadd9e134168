"""Training a sharded model gives the losses, gradients and parameters of the unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable_shard import ShardError, fully_shard
from composable_shard.testing import ParamSpec, TreeSpec, run_ranks
from training.compare import Comparison, step_both
from training.oracle import OPTIMIZERS, Unsharded
from training.trees import build, inputs_for, shard

ROWS = ParamSpec((3,)), ParamSpec((1, 5)), ParamSpec((2, 3)), ParamSpec((7, 2))
BIG = ParamSpec((301, 701)), ParamSpec((512, 512)), ParamSpec((5,))
INNER = ParamSpec((3, 5), dim=1), ParamSpec((2, 3, 5), dim=-1), ParamSpec((200, 301, 4), dim=1)
TREE = TreeSpec(ROWS, (TreeSpec(BIG), TreeSpec(INNER)))


def train(optimizer: str, max_norm: float | None) -> list[str]:
    """Train both on this rank; return what differs."""
    model = build(TREE)
    oracle = Unsharded(model)
    shard(model, TREE)
    exact = dist.get_world_size() <= 2 and optimizer.startswith("sgd") and max_norm is None
    comparison = Comparison(model, oracle, exact)
    comparison.params("before")
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (model, oracle.model)]
    for step in range(4):
        x = inputs_for(step, dist.get_rank())
        losses = [m(x).square().mean() for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
        if max_norm is not None:
            clip_both(max_norm, model, comparison, f"step {step}")
        step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


def clip_both(max_norm: float, model: nn.Module, comparison: Comparison, when: str) -> None:
    """Clip with torch's function on both sides."""
    oracle = comparison.oracle
    whole = [nn.Parameter(grad) for grad in oracle.totals().values()]
    for param in whole:
        param.grad = param.detach().clone()
    wanted = nn.utils.clip_grad_norm_(whole, max_norm)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    assert isinstance(norm, DTensor)
    comparison.tensor(f"{when}: norm", norm.full_tensor(), wanted)
    clipped = [param.grad for param in whole if param.grad is not None]
    oracle.reduced = dict(zip(oracle.reduced, clipped, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("optimizer", "max_norm"),
    [*((name, None) for name in OPTIMIZERS), ("sgd", 1e-3), ("sgd", 1e3)],
)
def test_every_optimizer_steps_and_clips_as_unsharded(
    optimizer: str, max_norm: float | None, ranks: int
) -> None:
    assert run_ranks(train, ranks, optimizer, max_norm, timeout=20) == [[]] * ranks


def shards_as_distributed(params: tuple[ParamSpec, ...]) -> list[bool]:
    spec = TreeSpec(params)
    full = [param.detach().clone() for param in build(spec).parameters()]
    model = shard(build(spec), spec)
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
        "Expected all gradients of group 'last' before its reduction, got one after it, of a "
        "graph that ran inside of this backward; run that before or after it"
    )
