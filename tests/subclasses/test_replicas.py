"""Gradients of tensor subclasses that wait for the replicas of a hybrid mesh."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from nets import average_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from composable_shard import fully_shard
from composable_shard.testing import run_ranks

NUM_SHARDS = 2
FACTORS = {"a": 1.0, "b": -2.0}
"""By what the inner tensors of a weight differ."""

Uses = tuple[bool, bool]


class Sum(nn.Module):
    """Adds up what the used ones of two layers without bias make of the input."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])

    def forward(self, x: torch.Tensor, uses: Uses) -> torch.Tensor:
        used = [weight for weight, is_used in zip(self.weights, uses, strict=True) if is_used]
        return sum((nn.functional.linear(x, weight) for weight in used), torch.zeros(()))


def models() -> tuple[Sum, dict[str, Sum]]:
    """Return a model of TwoTensors over a hybrid mesh, and a plain one for each inner tensor."""
    torch.manual_seed(0)
    values = [torch.randn(5, 3) for _ in range(2)]
    inner = {name: Sum([value * factor for value in values]) for name, factor in FACTORS.items()}
    two = Sum([TwoTensor(value * FACTORS["a"], value * FACTORS["b"]) for value in values])
    mesh = init_device_mesh("cpu", (2, NUM_SHARDS), mesh_dim_names=("replicate", "shard"))
    return fully_shard(two, mesh=mesh), inner


def run(model: Sum, plain: dict[str, Sum], step: int, uses: Uses) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(2, 3, generator=generator)
    for one in (model, *plain.values()):
        out = one(x, uses)
        if out.requires_grad:
            out.square().sum().backward()


def assert_mean(model: Sum, plain: dict[str, Sum]) -> None:
    """Compare each inner tensor of each gradient with the mean over all ranks."""
    model.reshard()
    for name, one in plain.items():
        for index, param in enumerate(model.weights):
            mean = nn.Parameter(torch.zeros(5, 3))
            local = one.weights[index].grad
            mean.grad = torch.zeros(5, 3) if local is None else local.clone()
            average_gradients([mean])
            own = mean.grad.chunk(NUM_SHARDS)[dist.get_rank() % NUM_SHARDS]
            assert isinstance(param.grad, DTensor) and param.grad.placements[-1] == Shard(0)
            got = getattr(param.grad.to_local(), name)
            torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-5)


def follow(steps: tuple[str, ...], uses: tuple[Uses, ...]) -> None:
    """Microbatches, each of which every second rank runs with the uses of the next one."""
    model, plain = models()
    for step, how in enumerate(steps):
        if how == "synchronize":
            model.synchronize_gradients()
        else:
            model.set_requires_gradient_sync(how != "no_sync")
            model.set_requires_all_reduce(how != "no_all_reduce")
            run(model, plain, step, uses[(step + dist.get_rank() % 2) % len(uses)])
        if how in ("sync", "synchronize"):
            assert_mean(model, plain)


def follow_with(with_hooks: bool, steps: tuple[str, ...], uses: tuple[Uses, ...]) -> None:
    with two_tensor_hooks() if with_hooks else contextlib.nullcontext():
        follow(steps, uses)


@pytest.mark.parametrize("with_hooks", [True, False])
@pytest.mark.parametrize(
    "steps",
    [
        ("no_all_reduce", "sync"),
        ("no_all_reduce", "no_all_reduce", "synchronize"),
        ("no_all_reduce", "no_sync", "sync"),
        ("sync", "no_sync", "no_all_reduce", "synchronize", "sync"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(
    "uses",
    [((True, True),), ((True, True), (True, False), (False, True))],
    ids=["all", "some"],
)
def test_microbatches_add_up_in_every_inner_tensor(
    with_hooks: bool, steps: tuple[str, ...], uses: tuple[Uses, ...]
) -> None:
    run_ranks(follow_with, 4, with_hooks, steps, uses, timeout=90)


def begun_by_the_user() -> list[list[float]]:
    """A gradient that users have put there, of a weight that no backward has reached."""
    model, _ = models()
    for param in model.weights:
        whole = TwoTensor(torch.ones(5, 3), torch.full((5, 3), 7.0))
        param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 3), (True, False)).sum().backward()
    model.synchronize_gradients()
    model.reshard()
    locals_ = [param.grad.to_local() for param in model.weights]
    return [[float(one.a[0, 0]), float(one.b[0, 0])] for one in locals_]


def test_a_gradient_of_the_users_waits_for_the_replicas() -> None:
    assert run_ranks(begun_by_the_user, 4, timeout=60) == [[[2.0, 8.0], [1.0, 7.0]]] * 4
