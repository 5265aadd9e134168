"""What timelines of ranks say: clocks on one scale, who waited for whom, lanes, where time goes.

A rank cannot have waited for a collective before every other has begun to launch it. So each
collective between two hosts bounds the difference of their clocks, from both sides since either
host waits for the other; ranks that are kept waiting make the bounds tight. The middle is taken,
which is off by no more than half the distance of the bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from composable_shard.insight.timeline.recording import RankTrace
from composable_shard.insight.timeline.spans import KINDS, Flight, Span

# Putting the clocks of several hosts on one scale, without a message ------------------------------


class Shift(NamedTuple):
    """What to add to the times of a clock.

    Attributes:
        by: Nanoseconds.
        error: How far off that may be; ``None`` if the hosts' wall clocks alone tell.
    """

    by: int
    error: int | None


Collective = tuple[tuple[int, ...], str, str, int]
"""The ranks, the op, the group and how many of these came before: the same on all its ranks."""


def collectives(trace: RankTrace) -> Iterator[tuple[Collective, Flight]]:
    """Yield what a rank communicated, by what its peers call the same.

    Gathers of parts that neighbours kept are left out: they wait for the neighbours alone.
    """
    sets = [tuple(ranks) for ranks in trace.rank_sets]
    for flight in trace.flights:
        if flight.op != "regather":
            yield (sets[trace.ranks_of(flight.op, flight.name)], *flight[:3]), flight


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


# Telling whether a rank waited for the wire or for another rank -----------------------------------


def with_lateness(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Say of every wait for which rank it was, and how long, before all had begun to launch.

    Args:
        traces: Of all ranks, by one clock.
    """
    last: dict[Collective, tuple[int, int]] = {}  # when the last rank began, and which one it was
    for trace in traces:
        for collective, flight in collectives(trace):
            last[collective] = max(
                last.get(collective, (flight.start, -1)), (flight.start, trace.rank)
            )
    return [replace(trace, spans=_spans(trace, last)) for trace in traces]


def _spans(trace: RankTrace, last: dict[Collective, tuple[int, int]]) -> list[Span]:
    spans = []
    for span in trace.spans:
        if span.kind == "wait" and span.number >= 0:
            ranks = tuple(trace.rank_sets[trace.ranks_of(span.op, span.name)])
            start, rank = last.get((ranks, span.op, span.name, span.number), (0, -1))
            late = min(start, span.end) - span.start
            if late > 0 and rank != trace.rank:
                span = Span(*span[:6], late, rank)
        spans.append(span)
    return spans


# PURE: what is drawn below what: the lanes of one rank --------------------------------------------

GATHERS = ("gather", "regather")


@dataclass(frozen=True)
class Lane:
    """What is drawn side by side; nothing in it overlaps.

    Attributes:
        title: What it is called.
        kind: ``steps``, ``compute``, ``waits``, ``gathers`` or ``reductions``.
        spans: What the rank did.
        flights: What was under way.
        steps: From when to when steps lasted.
    """

    title: str
    kind: str
    spans: Sequence[Span] = ()
    flights: Sequence[Flight] = ()
    steps: Sequence[tuple[int, int]] = field(default=())


def lanes_of(trace: RankTrace) -> list[Lane]:
    """Return the lanes of a rank from the top down."""
    lanes = [
        Lane("steps", "steps", steps=trace.intervals if trace.steps else ()),
        Lane("compute", "compute", [span for span in trace.spans if span.kind != "wait"]),
        Lane("exposed waits", "waits", [span for span in trace.spans if span.kind == "wait"]),
    ]
    gathers = [flight for flight in trace.flights if flight.op in GATHERS]
    others = [flight for flight in trace.flights if flight.op not in GATHERS]
    for kind, flights in (("gathers", gathers), ("reductions", others)):
        rows = side_by_side(flights) or [[]]
        for number, row in enumerate(rows, 1):
            lanes.append(Lane(kind if number == 1 else f"{kind} {number}", kind, flights=row))
    return lanes


def side_by_side(flights: Iterable[Flight]) -> list[list[Flight]]:
    """Put flights into as few rows as they need so that none overlaps in a row.

    Example:
        >>> one, two, three = (Flight("gather", "0", i, i, i + 2) for i in range(3))
        >>> [[flight.number for flight in row] for row in side_by_side([one, two, three])]
        [[0, 2], [1]]
    """
    rows: list[list[Flight]] = []
    for flight in sorted(flights, key=lambda one: (one.start, one.end)):
        row = next((row for row in rows if row[-1].end <= flight.start), None)
        if row is None:
            rows.append(row := [])
        row.append(flight)
    return rows


# What a timeline comes to: where the time of a step goes, and how much memory it takes ------------

MS = 1e6
PEAKS = ("peak_nbytes", "peak_reserved_nbytes")


def summarize(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the means over all steps, of each rank and over ranks.

    All but the memory in milliseconds of one step. What a rank does adds up to its step:
    ``forward``, ``backward`` and ``optimizer`` (together ``compute``), ``launch`` and ``copy`` of
    what is communicated, ``exposed`` waits, and ``other`` for what nobody tells: the loss, the next
    batch.
    ``late`` is the part of ``exposed`` in which another rank had not yet launched its part;
    ``communication`` is how long anything was under way, whatever went on meanwhile.

    ``exposed_share`` is the part of the step that is exposed; ``hidden_share`` the part of the
    communication that is not. ``peak_nbytes`` is the peak of live memory; ``peak_reserved_nbytes``
    that of what the caching allocator of a device has reserved, 0 where there is none.
    """
    ranks = [summarize_rank(trace) for trace in traces]
    first = traces[0]
    means = {
        name: sum(rank[name] for rank in ranks) / len(ranks)
        for name in ranks[0]
        if name.endswith("_ms") or name.endswith("_share")
    }
    present = {trace.rank for trace in traces}
    return {
        "num_ranks": first.num_ranks,
        "missing_ranks": [rank for rank in range(first.num_ranks) if rank not in present],
        "num_steps": min(len(trace.steps) for trace in traces),
        "first_step": first.first_step,
        **means,
        **{peak: max(rank[peak] for rank in ranks) for peak in PEAKS},
        "memory_of": first.memory_of,
        "ranks": ranks,
    }


def summarize_rank(trace: RankTrace) -> dict[str, Any]:
    """Return the same of one rank."""
    intervals = trace.intervals
    begin, end = intervals[0][0], intervals[-1][1]
    scale = 1 / (MS * len(intervals))
    total = dict.fromkeys(KINDS, 0)
    late = 0
    for span in trace.spans:
        if begin <= span.start and span.end <= end:  # a mark of a step ends what is under way
            total[span.kind] += span.end - span.start
            late += span.late
    step = end - begin
    flights = ((flight.start, flight.end) for flight in trace.flights)
    under_way = union_length((max(s, begin), min(e, end)) for s, e in flights)
    compute = total["forward"] + total["backward"] + total["optimizer"]
    return {
        "rank": trace.rank,
        "step_ms": step * scale,
        "compute_ms": compute * scale,
        "forward_ms": total["forward"] * scale,
        "backward_ms": total["backward"] * scale,
        "optimizer_ms": total["optimizer"] * scale,
        "launch_ms": total["launch"] * scale,
        "copy_ms": total["copy"] * scale,
        "exposed_ms": total["wait"] * scale,
        "late_ms": late * scale,
        "other_ms": (step - sum(total.values())) * scale,
        "communication_ms": under_way * scale,
        "exposed_share": total["wait"] / step if step else 0.0,
        "hidden_share": max(0.0, 1 - total["wait"] / under_way) if under_way else 1.0,
        "peak_nbytes": max((sample.nbytes for sample in trace.memory), default=0),
        "peak_reserved_nbytes": max((sample.reserved or 0 for sample in trace.memory), default=0),
    }


def union_length(ranges: Iterable[tuple[int, int]]) -> int:
    """Return how much lies in one of the ranges.

    Example:
        >>> union_length([(0, 4), (2, 6), (8, 9), (9, 8)])
        7
    """
    total, reached = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
