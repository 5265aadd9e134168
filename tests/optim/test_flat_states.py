"""States of flat steps are those of the stock optimizer, for whoever reads or edits them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import Replicate

from composable_shard import fully_shard
from composable_shard.optim import flat
from composable_shard.testing import fake_ranks
from optim.flat_pairs import MAKES, differences, pair, train

optim: Any = torch.optim

# Their order ----------------------------------------------------------------------------------


def layers(num: int) -> nn.Sequential:
    """Return equal layers, each with a buffer of its own."""
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


def renamed(net: Any, optimizer: Any) -> None:
    """The very same values in the same order, by each other's names."""
    for state in optimizer.state.values():
        values = dict(state)
        state.clear()
        state["step"] = values["step"]
        state["exp_avg_sq"], state["exp_avg"] = values["exp_avg"].abs_(), values["exp_avg_sq"]


def in_a_dict_of_the_users(net: Any, optimizer: Any) -> None:
    for param, state in optimizer.state.items():
        optimizer.state[param] = {**state, "step": torch.full((), 7.0)}


def other_steps(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.tensor(50.0)


def a_step_more(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].add_(1)


def one_step_in_place(net: Any, optimizer: Any) -> None:
    optimizer.state[net.blocks[1].down.weight]["step"].fill_(100.0)


def damped(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.mul_(0.5)


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
    renamed,
    in_a_dict_of_the_users,
    other_steps,
    a_step_more,
    one_step_in_place,
    damped,
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


@on_ranks(2)
def test_numbers_that_somebody_holds_count_on() -> None:
    """What they say after each step, stock and flat."""
    found = []
    for net, optimizer in pair(MAKES["nadam"], is_one_group=True):
        train(net, optimizer, range(2))  # before the second step, states of scalars are distributed
        states = [optimizer.state[param] for param in net.parameters()]
        held = [state[name] for state in states for name in ("step", "mu_product")]
        said = []
        for step in range(2, 6):
            train(net, optimizer, range(step, step + 1))
            said.append([number.item() for number in held])
        found.append(said)
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 4


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


class Now(torch.optim.Optimizer):
    """Has one state at a time: what a step makes is the next one's, which lets go of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                last = state.pop("average", None)
                if last is None:
                    state["average"] = param.grad.clone()
                else:
                    param.sub_(last.sign(), alpha=group["lr"])


@on_ranks(2)
def test_what_an_optimizer_lets_go_of_is_no_state() -> None:
    pairs = pair(Now, is_elementwise=True, is_one_group=True)
    for net, optimizer in pairs:
        train(net, optimizer, range(6))
    assert differences(pairs) == []


# Gradients unlike the parameters ------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(0,), (0, 1, 3), (2,)])
@on_ranks(2)
def test_gradients_of_another_dtype_at_times(steps: tuple[int, ...]) -> None:
    """Of which there are no flat buffers."""
    pairs = pair(partial(optim.SGD, lr=0.003, momentum=0.9), is_one_group=True)
    for net, optimizer in pairs:
        for step in range(5):
            net(torch.full((2, 9), 0.1 * step + dist.get_rank())).square().mean().backward()
            for param in net.parameters() if step in steps else ():
                grad, param.grad, param.grad_dtype = param.grad, None, None
                param.grad = grad.double()
            optimizer.step()
            for param in net.parameters():
                param.grad, param.grad_dtype = None, torch.float32
    assert differences(pairs) == []


# What looking costs -------------------------------------------------------------------------------


def calls(num_params: int) -> Counter[str]:
    """Count calls of Python's functions in a step of one buffer of parameters."""
    net: Any = fully_shard(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(num_params))))
    optimizer = flat(optim.AdamW(net.parameters(), foreach=True))
    net(torch.ones(1, 4)).sum().backward()
    seen = Counter[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1

    for _ in range(3):
        seen.clear()
        sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    assert optimizer.num_tensors() == [1]
    return seen


def test_a_step_calls_no_function_for_each_parameter() -> None:
    with fake_ranks(2):
        few, many = calls(4), calls(64)
    assert many == few
    assert few["_Steps._has_other_states"] == 1
