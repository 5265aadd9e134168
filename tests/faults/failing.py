"""Iterations that fail, and what is left of them."""

from __future__ import annotations

import pytest
import torch
from nets import Net, assert_parity, own_input, train_step, two_nets

from composable_shard.insight.events import record_events
from faults.raising import Break, after_root


def failing_step(model: Net, step: int, break_at: Break, error: type[BaseException]) -> None:
    handle = break_at(model, error)
    with pytest.raises(error):
        model(own_input(step)).square().sum().backward()
    handle.remove()


def train_with_failure(break_at: Break, error: type[BaseException], fail_in: int) -> None:
    reference, model = two_nets(2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(4):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            if step == fail_in:
                if one is model:
                    failing_step(model, step, break_at, error)
                continue
            train_step(one, step, None)
            optimizer.step()
    assert_parity(model, reference)


def events_after_failure(break_at: Break, error: type[BaseException]) -> None:
    """Compare the events of an iteration after a failed one with those of one before it."""
    _, model = two_nets(2)
    for step in range(2):
        train_step(model, step, None)
    with record_events(model) as before:
        train_step(model, 2, None)
    failing_step(model, 3, break_at, error)
    with record_events(model) as after:
        train_step(model, 4, None)
    # What the failed iteration left unsharded may be freed first, or, the root, be used again.
    start = after.index(("pre_forward", ""))
    assert all(event == "reshard" for event, _ in after[:start]), after[:start]
    assert reductions(after[start:]) == reductions(before)
    assert others(after[start:]) == others(before)
    # A forward that had ended may be a part of the loss: it is reduced where that would be.
    if break_at != after_root:
        assert without_root_gather(after[start:]) == without_root_gather(before)


ROOT_GATHER = [("all_gather", ""), ("wait_for_all_gather", "")]


def without_root_gather(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [event for event in events if event not in ROOT_GATHER]


def reductions(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [event for event in events if "reduce_scatter" in event[0]]


def others(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [event for event in without_root_gather(events) if event not in reductions(events)]
