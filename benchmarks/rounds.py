"""Fair timing: all contestants live in the same processes and take turns, round by round.

The load of a machine changes over seconds. What is compared are therefore the times of one
round, pair by pair; the order changes so that none always runs after the same other one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from contestants import Contestant, Spec, build_contestant

# Rank side: the contestants live here from one call to the next.
_BUILT: dict[str, Contestant] = {}


class Quartiles(NamedTuple):
    """The middle of a sample and where its middle half lies."""

    median: float
    lower: float
    upper: float


def build_all(names: Sequence[str], spec: Spec, num_warmup_steps: int = 2) -> None:
    """Build the contestants on this rank and let each find its buffers and its order."""
    for name in names:
        _BUILT[name] = build_contestant(name, spec)
        for step in range(num_warmup_steps):
            _BUILT[name].step(step)
    gc.collect()
    gc.freeze()  # no contestant pays for looking at the others' objects


def time_turn(name: str, num_steps: int) -> float:
    """Return this rank's seconds per step of one turn."""
    contestant = _BUILT[name]
    contestant.step(0)  # untimed: brings its weights back into the caches
    dist.barrier()
    start = time.perf_counter()
    for step in range(num_steps):
        contestant.step(step)
    return (time.perf_counter() - start) / num_steps


def time_round(order: Sequence[str], num_steps: int) -> dict[str, float]:
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


def slowest_rank(times: Sequence[dict[str, float]]) -> dict[str, float]:
    """Join the ranks' times of one round: a step has ended when it has on every rank."""
    return {name: max(rank[name] for rank in times) for name in times[0]}


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
