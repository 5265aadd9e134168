"""Complex parameters: backends know real numbers alone, so pairs of them travel."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import CoalescedAllGather, CoalescedReduceScatter

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
