"""``reset_iter_state``: harmless at any time, and back to the state between iterations."""

from __future__ import annotations

import pytest
from nets import Net, assert_parity, own_input, train_step, two_nets
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor

from composable_shard.insight.events import record_events
from faults.raising import Break, Failure, after_block, between_blocks


@pytest.mark.parametrize("of_block", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_reset_before_the_first_forward(of_block: bool) -> None:
    reference, model = two_nets(2)
    target = model.blocks[1] if of_block else model
    with record_events(model) as recorded:
        target.reset_iter_state()
        target.reset_iter_state()
    assert recorded == []
    for step in range(2):
        train_step(model, step, None)
        train_step(reference, step, None)
        model.zero_grad()
        reference.zero_grad()
    assert_parity(model, reference)


@pytest.mark.parametrize("is_added", [False, True])
@on_ranks(2)
def test_reset_drops_accumulated_gradients(is_added: bool) -> None:
    """What waits is dropped with what it was added to, in all groups whatever it was called on."""
    reference, model = two_nets(2)
    if is_added:
        train_step(model, 6, None)
    with model.no_sync():
        model(own_input(7)).square().sum().backward()
    assert all(param.grad.placements[0].is_partial() for param in model.parameters())
    model.blocks[0].reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    train_step(model, 1, None)
    train_step(reference, 1, None)
    assert_parity(model, reference)


def fail_at(model: Net, break_at: Break) -> None:
    handle = break_at(model, Failure)
    with pytest.raises(Failure):
        model(own_input(7)).square().sum().backward()
    handle.remove()


@pytest.mark.parametrize("break_at", [after_block, between_blocks], ids=str)
@on_ranks(2)
def test_reset_after_a_failure_drops_what_is_not_reduced(break_at: Break) -> None:
    """A failure amid accumulation, then a reset: all that is not reduced is gone."""
    reference, model = two_nets(2)
    with model.no_sync():
        model(own_input(5)).square().sum().backward()
    fail_at(model, break_at)
    model.reset_iter_state()
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.grad is None or not param.grad.placements[0].is_partial()
    model.zero_grad()
    train_step(model, 1, None)
    train_step(reference, 1, None)
    assert_parity(model, reference)
