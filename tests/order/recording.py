"""Records what happens in an iteration, in words that are short enough to compare whole lists."""

from __future__ import annotations

from collections.abc import Callable

import torch
from nets import own_input
from torch import nn

from composable_shard.insight.events import Event, record_events
from composable_shard.testing import run_ranks

SHORT = {
    "all_gather": "gather",
    "wait_for_all_gather": "wait",
    "reshard": "free",
    "reduce_scatter": "reduce",
    "wait_for_reduce_scatter": "finish",
}


def events(text: str) -> list[str]:
    """Split ``"gather root, wait root, pre_forward 0"``; blocks go by their number."""
    return [item.strip() for item in text.replace("\n", " ").split(",")]


def short(recorded: list[Event]) -> list[str]:
    return [
        f"{SHORT.get(event, event)} {name.removeprefix('blocks.') or 'root'}"
        for event, name in recorded
    ]


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(own_input()).sum()


def recorded_iterations(model: nn.Module, count: int) -> list[list[str]]:
    parts = []
    for _ in range(count):
        with record_events(model) as recorded:
            loss = loss_of(model)
        parts.append(short(recorded))
        with record_events(model) as recorded:
            loss.backward()
        parts.append(short(recorded))
    return parts


def on_ranks(fn: Callable[..., list[list[str]]], *args: object) -> list[list[str]]:
    """Run on two ranks, whose events are the same."""
    first, second = run_ranks(fn, 2, *args, timeout=60)
    assert first == second
    return first
