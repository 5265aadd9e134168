"""Optimizers whose kernels walk through memory, on shards that are not contiguous."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.distributed as dist
from nets import full
from torch import nn

from composable_shard import FSDPModule, fully_shard
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks


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


def stepped(name: str, fused: bool, syncs: bool) -> str:
    """Step twice beside an unsharded model, or return what is said."""
    plain = Strided()
    model = copy.deepcopy(plain)
    root = cast("FSDPModule", fully_shard(model))
    make = getattr(torch.optim, name)
    ours = make(model.parameters(), lr=0.05, **({"fused": True} if fused else {"foreach": True}))
    theirs = make(plain.parameters(), lr=0.05)
    root.set_requires_gradient_sync(syncs)
    for step in range(2):
        model(10 * step + dist.get_rank()).backward()
        for rank in range(dist.get_world_size()):
            (plain(10 * step + rank) / dist.get_world_size()).backward()
        try:
            ours.step()
        except ShardError as error:
            root.synchronize_gradients()
            ours.step()
            said = str(error)
        else:
            said = ""
        theirs.step()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param), other)
        ours.zero_grad()
        theirs.zero_grad()
    return said


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize(
    ("name", "fused"),  # torch has no fused SGD over DTensors
    [("Adam", True), ("AdamW", True), ("Adam", False), ("AdamW", False), ("SGD", False)],
)
def test_steps_of_strided_parameters(name: str, fused: bool, syncs: bool) -> None:
    message = (
        f"Expected reduced gradients for a fused step of {name}, got one that was accumulated "
        "without sync, of a parameter that is not contiguous; call synchronize_gradients() first, "
        "or leave out fused=True"
    )
    expected = message if fused and not syncs else ""
    assert run_ranks(stepped, 2, name, fused, syncs) == [expected] * 2
