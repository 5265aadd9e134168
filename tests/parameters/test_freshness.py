"""Parameters that change while gathered ones are kept are gathered again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Net, assert_parity, full, own_input, train_step, two_nets
from torch import nn

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks


def edited_while_sharded(by: str) -> None:
    """A parameter changed while the root is still unsharded is gathered again."""
    reference, model = two_nets(1)
    model.reshard()
    params = dict(model.named_parameters())
    with torch.no_grad():
        model(own_input())
        for name, param in params.items():
            if by == "in-place":
                param.mul_(0.5)
            else:
                param.to_local().mul_(0.5)
            reference.get_parameter(name).mul_(0.5)
        assert torch.equal(model(own_input()), reference(own_input()))


@pytest.mark.parametrize("by", ["in-place", "local"])
def test_edited_parameters_are_gathered_again(by: str) -> None:
    run_ranks(edited_while_sharded, 2, by)


def as_it_is(model: Net) -> None:
    pass


def assigned(model: Net) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def converted_twice(model: Net) -> None:
    model.double().float()


def used_before(model: Net) -> None:
    model(own_input()).sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    assigned(model)


Change = Callable[[Net], None]


def trained_while_kept(change: Change, foreach: bool) -> None:
    """Keep parameters gathered over steps of an optimizer that moves no version counter."""
    reference, model = two_nets(2)
    change(model)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for one in (model, reference)
    ]
    for step in range(3):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            train_step_of_plain_or_sharded(one, step)
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert_parity(model, reference)


def train_step_of_plain_or_sharded(model: Net, step: int) -> None:
    model(own_input(step)).square().sum().backward()
    if type(model) is Net:
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
            param.grad.div_(torch.distributed.get_world_size())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("change", [as_it_is, assigned, converted_twice, used_before])
def test_optimizer_steps_are_noticed(change: Change, foreach: bool, num_ranks: int) -> None:
    run_ranks(trained_while_kept, num_ranks, change, foreach)


def evaluated_between() -> None:
    """The root, kept by an evaluation before the step, is fresh after it."""
    reference, model = two_nets(1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(2):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(one, step, None)
            with torch.no_grad():
                one(own_input(7))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            got, expected = model(own_input(8)), reference(own_input(8))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_evaluation_before_the_step(num_ranks: int) -> None:
    run_ranks(evaluated_between, num_ranks)


def gathers_of_unchanged() -> list[str]:
    """What is kept for backward, and has not changed, is not gathered again."""
    _, model = two_nets(1)
    model.set_reshard_after_forward(False)
    model(own_input())
    with record_events(model, "all_gather") as recorded:
        model(own_input(1))
        model(own_input(2))
    return [name for _, name in recorded]


def test_what_has_not_changed_is_not_gathered_again() -> None:
    assert run_ranks(gathers_of_unchanged, 2) == [[]] * 2


# Arrays that share memory ---------------------------------------------------------------------


class Recording(nn.Module):
    """Keeps its weight of each call as an array that shares memory, and a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.arrays: list[Any] = []
        self.copies: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.arrays.append(self.layer.weight.detach().numpy())
        self.copies.append(self.layer.weight.detach().clone())
        return self.layer(x).tanh()


def train_with_arrays(reshard: bool) -> tuple[list[bool], list[str]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Recording(), Recording())
    reference = copy.deepcopy(model)
    for part in model:
        fully_shard(part, reshard_after_forward=reshard)
    fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    same = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                one(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(model, reference, strict=True):
                same.append(torch.allclose(ours.copies[-1], theirs.copies[-1]))
                same.append(torch.equal(torch.from_numpy(ours.arrays[-1]), ours.copies[-1]))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    same += [torch.allclose(full(ours), theirs) for ours, theirs in pairs]
    return same, sorted({str(one.message) for one in caught})


@pytest.mark.parametrize("reshard", [True, False])
def test_memory_that_an_array_shares_is_kept(reshard: bool) -> None:
    text = (
        "Expected to free memory of unsharded parameters, got some that an array shares, as "
        "that of weight.detach().numpy() does; it stays allocated, and the next gather "
        "overwrites it; keep a copy, such as weight.detach().clone().numpy()"
    )
    for same, warned in run_ranks(train_with_arrays, 2, reshard):
        assert all(same)
        assert warned == [text]
