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


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_rank_may_take_its_state_alone(reshard: bool) -> None:
    """The first rank looks at its state between forwards, and between forward and backward."""
    model: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=reshard)
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
    counts = [0, 0]
    dist.all_gather_object(counts, len(gathers))
    assert counts[0] == counts[1]
    assert torch.equal(whole(model.weight.grad), torch.full((4, 4), 2.0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_a_scalar_may_come_as_one_element(assign: bool) -> None:
    plain, model = Scaled(), fully_shard(Scaled())
    rest = {
        name: value.clone() for name, value in plain.linear.state_dict(prefix="linear.").items()
    }
    for scale in (torch.tensor([3.0]), torch.tensor(4.0)):
        for one in (plain, model):
            one.load_state_dict({**rest, "scale": scale}, assign=assign and one is model)
        assert whole(model.scale.detach()).item() == plain.scale.item()
        assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))


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
