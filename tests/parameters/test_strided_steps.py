"""Optimizers whose kernels walk through memory, on shards that are not contiguous."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import full
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard
from composable_shard.errors import ShardError


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
    """Step twice beside an unsharded model, or read what is said first."""
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
                f"Expected reduced gradients for a fused step of {name}, got one that was "
                "accumulated without sync, of a parameter that is not contiguous; call "
                "synchronize_gradients() first, or leave out fused=True"
            )
            model.synchronize_gradients()
        ours.step()
        theirs.step()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param), other)
        ours.zero_grad()
        theirs.zero_grad()
