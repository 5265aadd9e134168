"""Fair timing: all contestants live in the same processes and take turns, round by round.

The load of a machine changes over seconds. What is compared are therefore the times of one
round, pair by pair; the order changes so that none always runs after the same other one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist
from contestants import Contestant, Spec
from limit import Steps, build

# Rank side: the contestants live here from one call to the next.
_BUILT: dict[str, Steps] = {}


class Turn(NamedTuple):
    """Seconds per step: on the clock, and of processor time of one rank, all its threads."""

    wall: float
    processor: float


class Quartiles(NamedTuple):
    """The middle of a sample and where its middle half lies."""

    median: float
    lower: float
    upper: float


def build_one(name: str, spec: Spec, num_warmup_steps: int = 2) -> None:
    """Build a contestant on this rank and let it find its buffers and its order."""
    _BUILT[name] = build(name, spec)
    for step in range(num_warmup_steps):
        _BUILT[name].step(step)
    gc.collect()
    gc.freeze()  # no contestant pays for looking at the others' objects


def set_batch(batch: int) -> None:
    """Let every contestant train on that many sequences from now on."""
    for built in _BUILT.values():
        if isinstance(built, Contestant):
            built.spec = replace(built.spec, batch=batch)


def time_turn(name: str, num_steps: int) -> Turn:
    """Return this rank's seconds per step of one turn."""
    contestant = _BUILT[name]
    contestant.step(0)  # untimed: brings its weights back into the caches
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for step in range(num_steps):
        contestant.step(step)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Turn(wall / num_steps, processor / num_steps)


def time_round(order: Sequence[str], num_steps: int) -> dict[str, Turn]:
    return {name: time_turn(name, num_steps) for name in order}


def orders(names: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round: rotated, and every second time backwards.

    >>> ["".join(order) for order in orders("abc", 6)]
    ['abc', 'cba', 'bca', 'acb', 'cab', 'bac']
    """
    for index in range(num_rounds):
        shift = index // 2 % len(names)
        order = [*names[shift:], *names[:shift]]
        yield order[::-1] if index % 2 else order


def join_ranks(turns: Sequence[dict[str, Turn]]) -> dict[str, Turn]:
    """Join the ranks' times of one round: a step has ended when it has on every rank.

    >>> join_ranks([{"a": Turn(1.0, 3.0)}, {"a": Turn(2.0, 1.0)}])
    {'a': Turn(wall=2.0, processor=2.0)}
    """
    return {
        name: Turn(
            max(rank[name].wall for rank in turns),
            statistics.mean(rank[name].processor for rank in turns),
        )
        for name in turns[0]
    }


def quartiles(sample: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles of a sample of any length from one.

    >>> quartiles([1.0, 2.0, 3.0])
    Quartiles(median=2.0, lower=1.5, upper=2.5)
    """
    if len(sample) == 1:
        return Quartiles(sample[0], sample[0], sample[0])
    lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
    return Quartiles(median, lower, upper)


def ratios(mine: Sequence[float], other: Sequence[float]) -> Quartiles:
    """Compare two contestants round by round.

    >>> ratios([1.0, 2.0], [2.0, 4.0]).median
    0.5
    """
    return quartiles([a / b for a, b in zip(mine, other, strict=True)])


def spread(ratio: Quartiles) -> str:
    """Write the median and the quartiles.

    >>> spread(Quartiles(1.0, 0.5, 1.25))
    '1.000 (0.500 - 1.250)'
    """
    return f"{ratio.median:.3f} ({ratio.lower:.3f} - {ratio.upper:.3f})"
