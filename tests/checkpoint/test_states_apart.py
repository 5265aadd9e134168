"""States that one rank takes alone, and those of scalars."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import whole
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks


def taken_by_one_rank(reshard: bool) -> list[Any]:
    """The first rank looks at its state between forwards, and between forward and backward."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    fully_shard(model, reshard_after_forward=reshard)
    with record_events(model, "all_gather") as gathers:
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(1, 4))
            if dist.get_rank() == 0:
                assert all(isinstance(value, DTensor) for value in model.state_dict().values())
                assert all(isinstance(param, DTensor) for param in model.parameters())
            output = model(torch.ones(1, 4))
            if dist.get_rank() == 0:
                model.state_dict()
            output.sum().backward()
    model.reshard()
    return [len(gathers), whole(model.weight.grad).tolist()]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_rank_may_take_its_state_alone(reshard: bool) -> None:
    first, second = run_ranks(taken_by_one_rank, 2, reshard)
    assert first == second
    assert first[1] == [[2.0] * 4] * 4


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_full_optimizer_state_of_a_scalar_is_loaded() -> None:
    """Train, load the full optimizer state into another, train both on."""
    torch.manual_seed(0)
    model = fully_shard(Scaled())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(one: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        one.step()
        one.zero_grad()

    step(optimizer)
    options = StateDictOptions(full_state_dict=True)
    model.reshard()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    before = [whole(param.detach()).clone() for param in model.parameters()]
    step(optimizer)
    model.reshard()
    wanted = [whole(param.detach()).clone() for param in model.parameters()]
    with torch.no_grad():
        for param, value in zip(model.parameters(), before, strict=True):
            local = value.chunk(dist.get_world_size())[dist.get_rank()] if value.ndim else value
            param.to_local().copy_(local)  # type: ignore[attr-defined]
    other = torch.optim.Adam(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, other, state, options=options)
    step(other)
    model.reshard()
    got = [whole(param.detach()) for param in model.parameters()]
    assert [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)] == [True] * 3
