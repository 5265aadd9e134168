"""Fair timing: all contestants run in the same processes and take turns, round by round.

The load of a machine changes within seconds. So times are compared within each round, pair by
pair. The order changes from round to round, so that no contestant always runs after the same one.
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

# The contestants of this rank, kept between calls.
_BUILT: dict[str, Steps] = {}


class Turn(NamedTuple):
    """Seconds per step: wall time, and processor time of all threads of one rank."""

    wall: float
    processor: float


class Quartiles(NamedTuple):
    """The median and the quartiles of a sample."""

    median: float
    lower: float
    upper: float


def build_one(name: str, spec: Spec, num_warmup_steps: int = 2) -> None:
    """Build a contestant on this rank; the warm-up makes its buffers and records its order."""
    _BUILT[name] = build(name, spec)
    for step in range(num_warmup_steps):
        _BUILT[name].step(step)
    gc.collect()
    gc.freeze()  # no contestant pays for the objects of the others


def set_batch(batch: int) -> None:
    """Set the number of sequences of a batch for every contestant."""
    for built in _BUILT.values():
        if isinstance(built, Contestant):
            built.spec = replace(built.spec, batch=batch)


def time_turn(name: str, num_steps: int) -> Turn:
    """Time one turn on this rank; return the seconds per step."""
    contestant = _BUILT[name]
    contestant.step(0)  # untimed, to bring its weights back into the caches
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for step in range(num_steps):
        contestant.step(step)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Turn(wall / num_steps, processor / num_steps)


def time_round(order: Sequence[str], num_steps: int) -> dict[str, Turn]:
    return {name: time_turn(name, num_steps) for name in order}


def orders(names: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round: rotated, and reversed in every second round.

    >>> ["".join(order) for order in orders("abc", 6)]
    ['abc', 'cba', 'bca', 'acb', 'cab', 'bac']
    """
    for index in range(num_rounds):
        shift = index // 2 % len(names)
        order = [*names[shift:], *names[:shift]]
        yield order[::-1] if index % 2 else order


def join_ranks(turns: Sequence[dict[str, Turn]]) -> dict[str, Turn]:
    """Join the times of all ranks: the wall time of the slowest, the mean processor time.

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
    """Return the median and the quartiles of a sample.

    >>> quartiles([1.0, 2.0, 3.0])
    Quartiles(median=2.0, lower=1.5, upper=2.5)
    """
    if len(sample) == 1:
        return Quartiles(sample[0], sample[0], sample[0])
    lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
    return Quartiles(median, lower, upper)


def ratios(mine: Sequence[float], other: Sequence[float]) -> Quartiles:
    """Return the quartiles of the ratios of two contestants, round by round.

    >>> ratios([1.0, 2.0], [2.0, 4.0]).median
    0.5
    """
    return quartiles([a / b for a, b in zip(mine, other, strict=True)])


def spread(ratio: Quartiles) -> str:
    """Format the median and the quartiles.

    >>> spread(Quartiles(1.0, 0.5, 1.25))
    '1.000 (0.500 - 1.250)'
    """
    return f"{ratio.median:.3f} ({ratio.lower:.3f} - {ratio.upper:.3f})"
