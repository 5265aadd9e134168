"""Putting the clocks of several hosts on one scale, without a message.

A rank cannot have waited for a collective before every other has begun to launch it. So each
collective between two hosts bounds the difference of their clocks, from both sides since either
host waits for the other; ranks that are kept waiting make the bounds tight. The middle is taken,
which is off by no more than half the distance of the bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from composable_shard.insight.timeline.rank_trace import RankTrace
from composable_shard.insight.timeline.spans import Flight


class Shift(NamedTuple):
    """What to add to the times of a clock.

    Attributes:
        by: Nanoseconds.
        error: How far off that may be; ``None`` if the hosts' wall clocks alone tell.
    """

    by: int
    error: int | None


Collective = tuple[tuple[int, ...], str, str, int]
"""The ranks, the act, the group and how many of these came before: the same on all its ranks."""


def collectives(trace: RankTrace) -> Iterator[tuple[Collective, Flight]]:
    """Yield what a rank communicated, by what its peers call the same.

    Gathers of parts that neighbours kept are left out: they wait for the neighbours alone.
    """
    sets = [tuple(ranks) for ranks in trace.rank_sets]
    for flight in trace.flights:
        if flight.act != "regather":
            yield (sets[trace.ranks_of(flight.act, flight.name)], *flight[:3]), flight


def shifts(traces: Sequence[RankTrace]) -> dict[str, Shift]:
    """Return what to add to the times of each clock so that they are those of the first trace.

    Clocks are joined to it one after the other, the one with the tightest bounds first.
    """
    bounds = _bounds(traces)
    first = traces[0]
    joined = {first.clock: Shift(0, 0)}
    walls = {trace.clock: trace.wall - trace.begin for trace in reversed(traces)}
    while len(joined) < len(walls):
        width, clock, beside = min(
            (
                (bounds[one, other] + bounds[other, one], other, one)
                for one in joined
                for other in walls
                if other not in joined
            ),
        )
        if math.isinf(width):
            joined[clock] = Shift(walls[clock] - walls[first.clock], None)
            continue
        middle = round((bounds[clock, beside] - bounds[beside, clock]) / 2)
        known = joined[beside]
        error = None if known.error is None else known.error + abs(round(width / 2))
        joined[clock] = Shift(known.by + middle, error)
    return joined


def _bounds(traces: Sequence[RankTrace]) -> dict[tuple[str, str], float]:
    """Return for two clocks the most that the second may be behind the first.

    ``bounds[a, b]`` is the least ``end on b - start on a`` of their collectives: added to the
    times of a, anything more would let one end on b before it has begun on a.
    """
    starts: dict[Collective, dict[str, int]] = defaultdict(dict)  # the last of each clock's ranks
    ends: dict[Collective, dict[str, int]] = defaultdict(dict)  # the first
    for trace in traces:
        for collective, flight in collectives(trace):
            clock = trace.clock
            starts[collective][clock] = max(
                starts[collective].get(clock, flight.start), flight.start
            )
            ends[collective][clock] = min(ends[collective].get(clock, flight.end), flight.end)
    bounds: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for collective, began in starts.items():
        for one, start in began.items():
            for other, end in ends[collective].items():
                bounds[one, other] = min(bounds[one, other], end - start)
    return bounds
