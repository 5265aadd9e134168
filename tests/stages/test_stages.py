"""Parameters gathered, and gradients reduced, once in a step (ZeRO-1 and ZeRO-2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gathered import nbytes_of, note_gathered
from nets import Net, assert_parity, average_gradients, own_input, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial

from composable_shard import (
    MixedPrecisionPolicy,
    Sharding,
    clip_grad_norm_,
    explain,
    fully_shard,
)
from composable_shard.insight.events import record_events

NUM_STEPS, NUM_MICROBATCHES, NUM_GROUPS = 3, 3, 3
# For each sharding, the gathers and the reductions of a group in a step. ZeRO-3 gathers the blocks
# before each forward and, but for the last one, before each backward; the root once a microbatch.
COUNTS: dict[Any, tuple[int, int]] = {
    "zero1": (NUM_GROUPS, NUM_GROUPS),
    "zero2": (NUM_GROUPS, NUM_GROUPS * NUM_MICROBATCHES),
    "zero3": (5 * NUM_MICROBATCHES, NUM_GROUPS * NUM_MICROBATCHES),
    Sharding(reduce="step"): (5 * NUM_MICROBATCHES, NUM_GROUPS),
}


def backward(model: nn.Module, step: int) -> None:
    for microbatch in range(NUM_MICROBATCHES):
        model(own_input(10 * step + microbatch)).square().sum().backward()


def backward_and_average(model: nn.Module, step: int, *, at_end: bool) -> None:
    """Average the gradients of a whole model at the end, or those of each microbatch."""
    if at_end:
        backward(model, step)
        average_gradients(model.parameters())
        return
    for microbatch in range(NUM_MICROBATCHES):
        before = [param.grad for param in model.parameters()]
        model.zero_grad()
        model(own_input(10 * step + microbatch)).square().sum().backward()
        average_gradients(model.parameters())
        for param, grad in zip(model.parameters(), before, strict=True):
            param.grad = param.grad if grad is None else grad + param.grad


@pytest.mark.parametrize("sharding", COUNTS, ids=str)
@pytest.mark.parametrize("extents", [(2,), (1,), (2, 2)])
@on_ranks("extents")
def test_training(sharding: Any, extents: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", extents, mesh_dim_names=("replicate", "shard")[-len(extents) :])
    reference, model = two_nets(mesh=mesh, sharding=sharding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    expected = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(NUM_STEPS):
        with record_events(model, "all_gather", "reduce_scatter") as events:
            backward(model, step)
            optimizer.step()
        reduces_once = COUNTS[sharding][1] == NUM_GROUPS
        backward_and_average(reference, step, at_end=reduces_once)
        expected.step()
        assert_parity(model, reference)
        optimizer.zero_grad()
        expected.zero_grad()
    names = [name for name, _ in events]
    assert (names.count("all_gather"), names.count("reduce_scatter")) == COUNTS[sharding]


@on_ranks(2)
def test_gradients_are_whole_and_visible_until_they_are_reduced() -> None:
    reference, model = two_nets(sharding="zero1")
    for network in (reference, model):
        backward(network, 0)
    for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.grad is not None and param.grad.placements == (Partial("avg"),)
        assert torch.equal(param.grad.to_local(), whole.grad)
    average_gradients(reference.parameters())
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    with record_events(model, "reduce_scatter") as events:
        norm = clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(events) == NUM_GROUPS  # the step has nothing left to reduce
    torch.testing.assert_close(norm, expected)
    for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_a_backward_reduces_if_it_is_told_to() -> None:
    _, model = two_nets(sharding="zero1")
    with record_events(model, "reduce_scatter") as events:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(own_input()).sum().backward()
        assert len(events) == NUM_GROUPS
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(events) == NUM_GROUPS


@on_ranks(2)
def test_the_memory_of_parameters_stays_until_the_optimizer_has_stepped() -> None:
    _, model = two_nets(sharding="zero2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gathered = note_gathered(model)
    for _ in range(2):
        with torch.no_grad():
            model(own_input())
        assert not any(nbytes_of(gathered))  # an evaluation keeps nothing
        backward(model, 0)
        assert all(nbytes_of(gathered))
        assert all(hasattr(param, "placements") for param in model.parameters())
        optimizer.step()
        assert not any(nbytes_of(gathered))


@on_ranks(2)
def test_written_shards_are_gathered_anew() -> None:
    reference, model = two_nets(sharding="zero2")
    for network in (reference, model):
        network(own_input()).sum().backward()
        with torch.no_grad():
            for param in network.parameters():
                param.mul_(0.5)
    assert torch.equal(model(own_input()), reference(own_input()))


@on_ranks(2)
def test_the_last_choice_holds() -> None:
    _, model = two_nets(sharding="zero2")
    model.set_reshard_after_forward(True)
    gathered = note_gathered(model)
    backward(model, 0)
    assert not any(nbytes_of(gathered))


def test_explained() -> None:
    from composable_shard.testing import fake_ranks

    with fake_ranks(4):
        model = fully_shard(Net(), sharding="zero2", mp_policy=MixedPrecisionPolicy())
        text = str(explain(model))
    assert "the parameters are kept until the optimizer has stepped" in text


NAMES = "'zero1', 'zero2', 'zero3', 'hybrid'"
REFUSED = {
    f"Expected sharding to be one of {NAMES} or a Sharding, got 'zero4'": {"sharding": "zero4"},
    f"Expected sharding to be one of {NAMES} or a Sharding, got 2": {"sharding": 2},
    "Expected no reshard_after_forward with Sharding(gather='step', reduce='backward', "
    "replicas='copy'), which keeps the parameters until the optimizer has stepped, got True; "
    "leave out one of them": {"sharding": "zero2", "reshard_after_forward": True},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError) as caught:
        fully_shard(layer, **REFUSED[text])
    assert str(caught.value) == text
    assert type(layer) is nn.Linear


def test_choices() -> None:
    for wrong in ({"gather": "forward"}, {"reduce": "never"}):
        with pytest.raises(
            ValueError, match=r"^Expected (gather|reduce) to be '\w+' or 'step', got"
        ):
            Sharding(**wrong)
