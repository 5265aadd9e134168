"""Training steps that are compiled as a whole: forward, backward, and what a loop does besides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import Checkpointed, Net, average_gradients, both, own_input, shard_net
from torch import nn

from composable_shard import clip_grad_norm_
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

NUM_STEPS = 3


def step_of(model: Any, optimizer: torch.optim.Optimizer, way: str) -> Any:
    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    def everything(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(x)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    def microbatches(x: torch.Tensor) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        loss = backward(x)
        model.set_requires_gradient_sync(True)
        return loss + backward(2 * x)

    def chosen(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward(inputs=list(model.parameters()))
        return loss.detach()

    return {
        "backward": backward,
        "everything": everything,
        "microbatches": microbatches,
        "chosen": chosen,
    }[way]


def expected_step(model: Net, optimizer: torch.optim.Optimizer, way: str, x: torch.Tensor) -> Any:
    """Do the same unsharded and uncompiled, with the gradients of all ranks."""
    inputs = [x, 2 * x] if way == "microbatches" else [x]
    losses = [model(one).square().sum() for one in inputs]
    for loss in losses:
        loss.backward()
    average_gradients(model.parameters())
    if way == "everything":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return sum(losses)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality but for the order of sums, which a compiler may change."""
    torch.testing.assert_close(*both(actual.detach(), expected.detach()), rtol=1e-9, atol=1e-12)


def train(way: str, backend: str, make: type[Net]) -> list[list[str]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = make(2).double()
    model = copy.deepcopy(reference)
    shard_net(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    step = torch.compile(step_of(model, optimizers[0], way), backend=backend)
    events = []
    for number in range(NUM_STEPS):
        with record_events(model, "all_gather", "reduce_scatter") as recorded:
            loss = step(own_input(number).double())
        batch = own_input(number).double()
        assert_close(loss, expected_step(reference, optimizers[1], way, batch))
        for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(param, wanted)
            assert param.grad is not None and wanted.grad is not None
            assert_close(param.grad, wanted.grad)
        if way != "everything":
            for optimizer in optimizers:
                optimizer.step()
        for one in (model, reference):
            one.zero_grad()
        events.append([event for event, _ in recorded])
    return events


WAYS = ["everything", "microbatches", "backward", "chosen"]


CASES = [
    *((way, Net) for way in WAYS),
    ("everything", Checkpointed),
    ("microbatches", Checkpointed),
]


@pytest.mark.brief(2)
@pytest.mark.parametrize(("way", "make"), CASES)
def test_a_compiled_step_trains_as_unsharded(way: str, make: type[Net]) -> None:
    for events in run_ranks(train, 2, way, "aot_eager", make, timeout=240):
        num_backwards = 2 if way == "microbatches" else 1
        assert [one.count("reduce_scatter") for one in events] == [3] * NUM_STEPS
        # the root stays gathered; the last block is needed first in backward from the second on
        assert events[-1].count("all_gather") <= 5 * num_backwards


@pytest.mark.matrix
def test_a_step_compiled_by_inductor_trains_as_unsharded() -> None:
    run_ranks(train, 2, "everything", "inductor", Net, timeout=280)
