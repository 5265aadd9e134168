"""Complex parameters: backends know real numbers alone, so pairs of them travel."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import CoalescedAllGather, CoalescedReduceScatter
from composable_shard.testing import run_ranks

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


def train(coalesced: bool, users: tuple[bool, ...]) -> list[str]:
    """Train for two steps; return the parameters whose gradient is not the mean over the ranks."""
    torch.manual_seed(0)
    model: Any = Waves()
    reference = copy.deepcopy(model)
    choose = coalescing if coalesced else Channel._use_fastest
    with mock.patch.object(Channel, "_use_fastest", choose):
        fully_shard(model)
    rank, wrong = dist.get_rank(), []
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, WIDTH, generator=generator)
        for either in (model, reference):
            either(x, users[rank]).backward()
        for (name, mine), other in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if other.grad is None and any(users):
                other.grad = torch.zeros_like(other)
            if other.grad is None or mine.grad is None:
                wrong += [] if other.grad is mine.grad else [name]
                continue
            dist.all_reduce(other.grad)
            if not torch.equal(shards_of(mine.grad), other.grad / dist.get_world_size()):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("users", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("coalesced", [False, True])
def test_gradients_are_the_mean_over_the_ranks(coalesced: bool, users: tuple[bool, bool]) -> None:
    assert run_ranks(train, 2, coalesced, users) == [[], []]


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("name", ["reduce_dtype", "grad_dtype", "param_dtype"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_dtype_of_the_policy_leaves_complex_gradients_complex(
    name: str, rows: int, ranks: int
) -> None:
    assert (
        run_ranks(under_a_real_policy, ranks, name, rows, timeout=60)
        == [("torch.complex64", True)] * ranks
    )


def under_a_real_policy(name: str, rows: int) -> tuple[str, bool]:
    model = nn.Linear(3, rows, bias=False, dtype=torch.complex64)
    plain = copy.deepcopy(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**{name: torch.float32}))
    for one in (model, plain):
        one(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    grad, expected = model.weight.grad, plain.weight.grad
    assert isinstance(grad, DTensor) and expected is not None
    return str(grad.dtype), torch.allclose(shards_of(grad), expected)
