"""The first forward of all, or after parameters were replaced, runs under inference mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from nets import Net, average_gradients, full, own_input, shard_net
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy

Change = Callable[[nn.Module], None]


def nothing(model: nn.Module) -> None:
    pass


def to_empty(model: nn.Module) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def load_by_assignment(model: nn.Module) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES = [nothing, to_empty, load_by_assignment, nn.Module.double]


def train(model: nn.Module, step: int, optimizer: torch.optim.Optimizer | None = None) -> float:
    dtype = next(iter(model.parameters())).dtype
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    loss = model(own_input(step).to(dtype)).square().sum()
    loss.backward()
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        average_gradients(model.parameters())
    optimizer.step()
    model.zero_grad()
    return float(loss.detach())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "number": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.float64)},
}


@pytest.mark.brief(5)
@pytest.mark.parametrize("trains_before", [False, True])
@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [*product(("plain", "kept", "offloaded", "mixed"), (2, 1, 3)), ("number", 4)],
)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks("num_ranks")
def test_inference_comes_first(change: Change, options: str, trains_before: bool) -> None:
    reference = Net(2)
    pair = (shard_net(copy.deepcopy(reference), **OPTIONS[options]), reference)
    for one in pair:
        if trains_before:
            train(one, 30)
        change(one)
    for step in range(3):
        outputs = []
        for one in pair:
            dtype = next(iter(one.parameters())).dtype
            with torch.inference_mode():
                outputs.append(one(own_input(step).to(dtype)).clone().to(dtype))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        losses = [train(one, step) for one in pair]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
        for (name, param), expected in zip(
            pair[0].named_parameters(), reference.parameters(), strict=True
        ):
            assert not param.is_inference(), name
            torch.testing.assert_close(full(param), expected, rtol=1e-4, atol=1e-5, msg=name)
        for one in pair if step == 1 else ():
            change(one)


@on_ranks(2)
def test_an_evaluation_of_unsharded_parameters_with_gradients() -> None:
    reference, model = (Net() for _ in range(2))
    model.load_state_dict(reference.state_dict())
    shard_net(model)
    for network in (reference, model):
        network(own_input()).sum().backward()
    model.unshard()
    with torch.inference_mode():
        evaluated = model(own_input(1))
    assert torch.equal(evaluated, reference(own_input(1)))
    for network in (reference, model):
        network(own_input(2)).sum().backward()
    average_gradients(reference.parameters())
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)
