"""Gradients of gradients: of inputs they are exact, into parameters they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import (
    Net,
    assert_parity,
    assert_same,
    average_gradients,
    own_input,
    shard_net,
    train_step,
)
from torch import nn

from composable_shard import ShardError, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient penalty, as of a critic: the norm of the gradient of the input."""
    x.requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.square().sum(), [x], create_graph=True)
    return output.sum() + (grad.norm(dim=1) - 1).square().sum()


def penalty_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).tanh().sum(), [x], create_graph=True)
    return grad.square().sum()


def penalty_by_part(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to part of the input, changed in place before it is used."""
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).tanh().sum(), [x], create_graph=True)
    part = grad[:, 1:]
    part.mul_(2)
    return (part**3).sum()


def third_order(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x).tanh().sum(), [x], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), [x], create_graph=True)
    return second.square().sum()


def two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return penalty(model, x) + penalty_alone(model, x.detach() * 2)


PENALTIES = [penalty, penalty_alone, penalty_by_part, third_order, two_forwards]


def train(
    loss_of: Callable[..., torch.Tensor], reshard: bool | None, sync: bool
) -> list[tuple[int, int]]:
    torch.manual_seed(0)
    reference = Net(2)
    model = shard_net(copy.deepcopy(reference), reshard_after_forward=reshard)
    counts = []
    for step in range(3):
        model.set_requires_gradient_sync(sync or step == 2)
        with record_events(model, "reduce_scatter", "reshard") as recorded:
            loss = loss_of(model, own_input(step))
            loss.backward()
        expected = loss_of(reference, own_input(step))
        expected.backward()
        torch.testing.assert_close(loss, expected)
        if not sync and step < 2:
            continue
        average_gradients(reference.parameters())
        model.reshard()
        for (name, param), wanted in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert param.grad.placements == param.placements, name
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=name)
        model.zero_grad()
        reference.zero_grad()
        happened = [event for event, _ in recorded]
        counts.append(happened.count("reduce_scatter"))
    return counts


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("loss_of", PENALTIES)
def test_gradient_penalties_are_exact(
    loss_of: Callable[..., torch.Tensor], reshard: bool | None
) -> None:
    for ranks in (1, 2):
        run_ranks(train, ranks, loss_of, reshard, True)
    run_ranks(train, 2, loss_of, reshard, False)


# Inside forward -----------------------------------------------------------------------------------


class Energy(nn.Module):
    """Returns an energy and, as forces, its gradient with respect to positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(2)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.net(positions * self.scale).tanh().sum()
            create = self.training
            (forces,) = torch.autograd.grad(energy, [positions], create_graph=create)
        return energy, forces * self.scale


def train_energy(reshard: bool | None) -> list[tuple[int, int]]:
    torch.manual_seed(0)
    reference = Energy()
    model = copy.deepcopy(reference)
    for block in model.net.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    counts = []
    for step in range(3):
        with record_events(model, "reduce_scatter") as in_forward:
            energy, forces = model(own_input(step))
        with record_events(model, "reduce_scatter") as in_backward:
            (energy + forces.square().sum()).backward()
        expected_energy, expected_forces = reference(own_input(step))
        (expected_energy + expected_forces.square().sum()).backward()
        torch.testing.assert_close(forces, expected_forces)
        average_gradients(reference.parameters())
        model.reshard()
        for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)
        model.zero_grad()
        reference.zero_grad()
        counts.append((len(in_forward), len(in_backward)))
    for one in (model, reference):
        one.eval()
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            for got, wanted in zip(model(own_input(7)), reference(own_input(7)), strict=True):
                assert_same(got.detach(), wanted.detach())
    return counts


@pytest.mark.parametrize("reshard", [True, False, None])
def test_gradients_taken_inside_forward(reshard: bool | None) -> None:
    """Nothing is reduced in forward, and each of three groups once in backward."""
    assert run_ranks(train_energy, 2, reshard) == [[(0, 3)] * 3] * 2


# Into parameters --------------------------------------------------------------------------------

CREATE_GRAPH = (
    "Expected a backward into the parameters of {} without create_graph=True, got one with it, "
    "whose graph ends where gradients are reduced; take gradients of inputs by "
    "torch.autograd.grad(loss, inputs, create_graph=True)"
)
TEXTS = {"create_graph": CREATE_GRAPH.format("the root group")}


def refused(reshard: bool | None) -> list[str]:
    reference = Net(2)
    model = shard_net(copy.deepcopy(reference), reshard_after_forward=reshard)
    texts = []
    for step in range(4):
        if step in (0, 2):
            loss = model(own_input(step)).square().sum()
            with pytest.raises(ShardError) as caught:
                loss.backward(create_graph=True)
            texts.append(str(caught.value))
            del loss
        else:
            train_step(model, step, None)
            train_step(reference, step, None)
            assert_parity(model, reference)
            model.zero_grad()
            reference.zero_grad()
    return texts


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("reshard", [True, False, None])
def test_create_graph_into_parameters_is_refused(reshard: bool | None) -> None:
    assert run_ranks(refused, 2, reshard) == [[TEXTS["create_graph"]] * 2] * 2


def alone(_: Any = None) -> None:
    """A frozen model has no gradients to reduce, and allows it."""
    model = shard_net(Net(2).requires_grad_(False))
    x = own_input().requires_grad_()
    model(x).square().sum().backward(create_graph=True)
    assert x.grad is not None and x.grad.requires_grad
    x.grad.sum().backward()


def test_create_graph_of_a_frozen_model_works() -> None:
    run_ranks(alone, 2)
