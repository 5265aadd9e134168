"""PURE: what is drawn below what: the lanes of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from composable_shard.insight.timeline.rank_trace import RankTrace
from composable_shard.insight.timeline.spans import Flight, Span

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
    gathers = [flight for flight in trace.flights if flight.act in GATHERS]
    others = [flight for flight in trace.flights if flight.act not in GATHERS]
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
