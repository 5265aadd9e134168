"""Recordings by a clock that ticks once for each mark."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.insight.merging import GroupFacts, RankTrace, Sample, Span
from composable_shard.insight.trace import Clock, LiveMemory, Timeline
from composable_shard.testing import fake_ranks

MS = 1_000_000


class Ticks(Clock):
    """A clock that is a millisecond further each time it is asked."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def stamp(self) -> int:
        return next(self._count) * MS


def growing_memory() -> LiveMemory:
    return LiveMemory(zip(itertools.count(100), itertools.repeat(None)).__next__, "heap")


def two_layers(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded_steps(
    num_steps: int,
    folder: Path | None = None,
    rank: int = 0,
    **kwargs: Any,
) -> RankTrace:
    with fake_ranks(2, rank=rank):
        model = two_layers(**kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        timeline = Timeline(model, folder, clock=Ticks(), memory=growing_memory())
        for _ in range(num_steps):
            train(model, optimizer)
            timeline.step()
        timeline.stop()
    assert timeline.recorded is not None
    return timeline.recorded


def made_up(
    rank: int = 0,
    *,
    num_ranks: int = 2,
    clock: str = "host",
    behind: int = 0,
    flights: Sequence[Span] = (),
    spans: Sequence[Span] = (),
) -> RankTrace:
    """Make the trace of a rank whose clock is some nanoseconds behind the first host's."""
    return RankTrace(
        rank=rank,
        num_ranks=num_ranks,
        clock=clock,
        wall=10**18,
        device="cpu",
        memory_of="heap",
        begin=0,
        end=100,
        first_step=0,
        steps=[],
        groups={"": GroupFacts(64, 0, rank), "0": GroupFacts(80, 0, rank)},
        spans=list(spans),
        flights=list(flights),
        memory=[Sample(0, 2**20), Sample(50, 3 * 2**20)],
    ).shifted(-behind)
