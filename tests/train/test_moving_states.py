"""Ranks that join a model have the states of optimizers in the order of those that had them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from composable_shard import fully_shard, move
from train.moved import on_mesh

WIDTH = 4


class Scaled(nn.Module):
    """Three equal layers, and a scalar, whose states are numbers and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def model_of_rank_0() -> tuple[nn.Module, nn.Module]:
    """Return a model that rank 0 has and that others have without values; and the same, plain."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = Scaled()
    model = copy.deepcopy(whole).to("meta" if rank else "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=on_mesh(rank))
    return fully_shard(model, mesh=on_mesh(rank)), whole


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_full_checkpoint_after_a_join_has_the_moments_of_each_parameter() -> None:
    """The first layer is trained from the second step on: it comes last among the states."""
    model, whole = model_of_rank_0()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, whole)]
    for one, optimizer in zip((model, whole), optimizers, strict=True):
        if one is whole or dist.get_rank() == 0:
            for is_trained in (False, True):
                one.layers[0].weight.requires_grad_(is_trained)
                train(one, optimizer)
    move(model, optimizers[0], on_mesh(0, 1))
    orders = [list(optimizer.state_dict()["state"]) for optimizer in optimizers]
    assert orders[0] == orders[1] == [0, 2, 3, 1]  # of the scalar, and of the layers
    full: Any = get_optimizer_state_dict(
        model, optimizers[0], options=StateDictOptions(full_state_dict=True)
    )
    for name, param in whole.named_parameters():
        expected = optimizers[1].state[param]
        assert list(full["state"][name]) == list(expected)
        for kind, value in expected.items():
            torch.testing.assert_close(full["state"][name][kind], value, msg=f"{name} {kind}")


def check_goes_back(kind: type[torch.optim.Optimizer], step_after: bool) -> None:
    """Let rank 1 join, and leave again."""
    model, whole = model_of_rank_0()
    optimizers = [kind(one.parameters(), lr=0.1) for one in (model, whole)]
    train(whole, optimizers[1])
    if dist.get_rank() == 0:
        train(model, optimizers[0])
    move(model, optimizers[0], on_mesh(0, 1))
    names = [[*map(list, optimizer.state.values())] for optimizer in optimizers]
    assert names[0] == names[1]
    for one, optimizer in zip((model, whole), optimizers, strict=True):
        if step_after:
            train(one, optimizer)
    move(model, optimizers[0], on_mesh(0))
    if dist.get_rank() == 0:
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        for param, plain in pairs:
            states = optimizers[0].state[param]
            for name, value in optimizers[1].state[plain].items():
                got = states[name]
                full = got.to_local() if hasattr(got, "to_local") else got
                torch.testing.assert_close(full, value, msg=name)


@on_ranks(2)
def test_numbers_and_tensors_keep_their_order_as_a_rank_joins() -> None:
    """Their order is that in which an optimizer makes them; that of a scalar is told, not sent."""
    for kind in (torch.optim.NAdam, torch.optim.ASGD):
        for step_after in (False, True):
            check_goes_back(kind, step_after)
