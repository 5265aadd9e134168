"""Scalars, other strides, mixed dtypes: parameters of every kind train as the oracle's."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes.compare import Oracle, step_differences
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable_shard import fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import CoalescedAllGather, CoalescedReduceScatter
from composable_shard.errors import ShardError
from composable_shard.testing import fake_ranks


class Kinds(nn.Module):
    """A convolution in channels-last, a transposed weight, a strided one, scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 5).T)
        self.strided = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(-0.5))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale
        return F.linear(x, self.transposed) @ self.strided.tanh() + self.offset * self.frozen


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, 3, 5, 5, generator=generator)


@pytest.mark.parametrize("dim", [None, 1, -1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_scalars_and_other_strides(dim: int | None) -> None:
    train(dim, None, True)


@on_ranks(4)
def test_scalars_and_other_strides_on_a_hybrid_mesh() -> None:
    train(None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), True)


@on_ranks(4)
def test_scalars_and_other_strides_gather_from_fewer_ranks() -> None:
    train(None, None, 2)


def test_a_group_without_elements_gathers_nothing() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(torch.empty(3, 0))
    with fake_ranks(4):
        output = fully_shard(layer)(torch.ones(2, 0))
        output.sum().backward()
    assert output.tolist() == [[0.0] * 3] * 2
    assert layer.weight.grad is not None and layer.weight.grad.shape == (3, 0)


def train(dim: int | None, mesh: DeviceMesh | None, reshard: bool | int) -> None:
    torch.manual_seed(0)
    model = Kinds()
    oracle = Oracle(model)
    place = None if dim is None else lambda param: Shard(dim) if param.ndim > 1 else None
    for module in (model.conv, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=place, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    for step in range(6):
        model.set_requires_gradient_sync(step % 3 != 0)
        model.set_requires_all_reduce(step % 3 != 1)
        for either in (model, oracle.model):
            either(batch(step)).square().sum().backward()
        oracle.take()
        if step % 3 == 2:
            model.reshard()
            oracle.reduce()
            assert step_differences(model, oracle, optimizers) == []
        elif mesh is None and step % 3 == 1:
            oracle.reduce()


@on_ranks(2)
def test_strides_are_kept_and_scalars_replicated() -> None:
    strides = {"conv.weight": (27, 1, 9, 3), "transposed": (1, 5), "strided": (4, 1)}
    model: Any = fully_shard(Kinds(), reshard_after_forward=False)
    for name, stride in strides.items():
        param = model.get_parameter(name)
        assert (param.stride(), param.placements) == (stride, (Shard(0),))
    model(batch(0)).sum().backward()
    model.unshard()
    assert {name: model.get_parameter(name).stride() for name in strides} == strides
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    model.reshard()
    assert model.scale.placements == (Replicate(),) and model.scale.to_local().shape == ()


# Complex parameters, which travel as pairs of real numbers ----------------------------------------


WIDTH = 140  # a matrix of it has a message of its own


class Waves(nn.Module):
    """Complex weights, large and small ones; one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.extra = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, uses_extra: bool) -> torch.Tensor:
        y = x.to(torch.complex64) @ self.matrix + self.bias
        if uses_extra:
            y = y * self.extra.sum()
        return y.abs().square().sum()


def shards_of(tensor: DTensor) -> torch.Tensor:
    """Gather a DTensor without relying on what torch does with complex ones."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, tensor.detach().to_local())
    return torch.cat(heard)


def coalescing(channel: Channel) -> None:
    channel.all_gather, channel.reduce_scatter = CoalescedAllGather(), CoalescedReduceScatter()


@pytest.mark.parametrize("users", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("coalesced", [False, True])
@on_ranks(2)
def test_gradients_are_the_mean_over_the_ranks(coalesced: bool, users: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    model: Any = Waves()
    reference = copy.deepcopy(model)
    choose = coalescing if coalesced else Channel._use_fastest
    with mock.patch.object(Channel, "_use_fastest", choose):
        fully_shard(model)
    rank = dist.get_rank()
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, WIDTH, generator=generator)
        for either in (model, reference):
            either.zero_grad()
            either(x, users[rank]).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            if other.grad is None and any(users):
                other.grad = torch.zeros_like(other)
            if other.grad is None or mine.grad is None:
                assert other.grad is mine.grad
                continue
            dist.all_reduce(other.grad)
            assert torch.equal(shards_of(mine.grad), other.grad / dist.get_world_size())


# Steps whose kernels walk through memory ----------------------------------------------------------


class Strided(nn.Module):
    """A transposed weight and a channels-last one, whose every element has its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, place: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(place)
        total = torch.zeros(())
        for param in (self.turned, self.conv.weight, self.bias):
            total = total + (param * torch.randn(param.shape, generator=generator)).sum()
        return total


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize(
    ("name", "fused"),  # torch has no fused SGD over DTensors
    [("Adam", True), ("AdamW", True), ("Adam", False), ("AdamW", False), ("SGD", False)],
)
@on_ranks(2)
def test_steps_of_strided_parameters(name: str, fused: bool, syncs: bool) -> None:
    plain = Strided()
    model: Any = copy.deepcopy(plain)
    fully_shard(model)
    make = getattr(torch.optim, name)
    ours = make(model.parameters(), lr=0.05, **({"fused": True} if fused else {"foreach": True}))
    theirs = make(plain.parameters(), lr=0.05)
    model.set_requires_gradient_sync(syncs)
    for step in range(2):
        model(10 * step + dist.get_rank()).backward()
        for rank in range(dist.get_world_size()):
            (plain(10 * step + rank) / dist.get_world_size()).backward()
        if fused and not syncs:
            with pytest.raises(ShardError) as caught:
                ours.step()
            assert str(caught.value) == (
                f"Expected reduced gradients for a fused step of {name}, got an unreduced one of a "
                "parameter that is not contiguous; call synchronize_gradients(), or drop fused=True"
            )
            model.synchronize_gradients()
        ours.step()
        theirs.step()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param), other)
        ours.zero_grad()
        theirs.zero_grad()
