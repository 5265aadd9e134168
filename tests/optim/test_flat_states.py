"""States of flat steps are those of the stock optimizer, for whoever reads or edits them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import Replicate

from composable_shard import fully_shard
from composable_shard.optim import flat
from optim.flat_pairs import MAKES, differences, pair, train

optim: Any = torch.optim

# Their order ----------------------------------------------------------------------------------


def layers(num: int) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(num)))
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


@pytest.mark.parametrize("is_reversed", [False, True])
@on_ranks(2)
def test_they_come_in_the_order_of_the_stock_optimizer(is_reversed: bool) -> None:
    """Whatever order addresses have, it is not that of parameters both forwards and backwards.

    So do those of a full state dict, which has those of each parameter.
    """
    found = []
    for wraps in (lambda one: one, flat):
        net = layers(5)
        params = list(net.parameters())
        optimizer = wraps(optim.AdamW(params[::-1] if is_reversed else params))
        for used in (net[1:4], net):  # the others have states later
            used(torch.arange(12.0).view(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()["state"]
        found.append([list(states), [list(state) for state in states.values()]])
        named = dict(net.named_parameters())
        values = {name: optimizer.state[named[name]]["exp_avg"].full_tensor() for name in named}
        options = StateDictOptions(full_state_dict=True)
        full = get_optimizer_state_dict(net, optimizer, options=options)["state"]
        assert all(torch.equal(values[name], full[name]["exp_avg"]) for name in named)
    assert found[0] == found[1]


# Edits ----------------------------------------------------------------------------------------


def cleared(net: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def emptied(net: Any, optimizer: Any) -> None:
    for param in net.parameters():
        optimizer.state[param] = {}


def one_deleted(net: Any, optimizer: Any) -> None:
    del optimizer.state[net.blocks[0].up.weight]


def made_anew(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def exchanged(net: Any, optimizer: Any) -> None:
    one, other = (optimizer.state[block.up.weight] for block in net.blocks)
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"].mul(2)


def other_steps(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.tensor(50.0)


def a_step_more(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].add_(1)


def in_other_dtypes(net: Any, optimizer: Any) -> None:
    state = optimizer.state[net.blocks[0].up.weight]
    state["step"] = state["step"].to(torch.float64)
    state["exp_avg_sq"] = state["exp_avg_sq"].to(torch.float64)


def replicated(net: Any, optimizer: Any) -> None:
    state = optimizer.state[net.blocks[0].up.weight]
    state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])


EDITS = [
    cleared,
    emptied,
    one_deleted,
    made_anew,
    exchanged,
    other_steps,
    a_step_more,
]
IN_A_LOOP = [in_other_dtypes, replicated]
"""Of which foreach steps of DTensors know nothing."""


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "adamw fused"])
@pytest.mark.parametrize("how", [*EDITS, *IN_A_LOOP], ids=lambda how: how.__name__)
@on_ranks(2)
def test_edits_of_states_count(how: Callable[[Any, Any], None], name: str) -> None:
    pairs = pair(MAKES[name if how in EDITS else "adamw"], is_one_group=True)
    for net, optimizer in pairs:
        train(net, optimizer, range(2))
        how(net, optimizer)
        train(net, optimizer, range(2, 4))
        how(net, optimizer)
        train(net, optimizer, range(4, 6))
    assert differences(pairs) == []


# States that become tensors -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
@on_ranks(2)
def test_momentum_begins_once_after_none_was_loaded(name: str) -> None:
    pairs = pair(MAKES[name], is_one_group=True)
    for net, optimizer in pairs:
        train(net, optimizer, range(1))
        states = optimizer.state_dict()
        for state in states["state"].values():
            state["momentum_buffer"] = None
        optimizer.load_state_dict(states)
        train(net, optimizer, range(6, 11))  # with all gradients, without some, and so on
    assert differences(pairs) == []
