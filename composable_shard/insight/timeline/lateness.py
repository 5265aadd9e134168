"""Telling whether a rank waited for the wire or for another rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from composable_shard.insight.timeline.alignment import Collective, collectives
from composable_shard.insight.timeline.rank_trace import RankTrace
from composable_shard.insight.timeline.spans import Span


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
            ranks = tuple(trace.rank_sets[trace.ranks_of(span.act, span.name)])
            start, rank = last.get((ranks, span.act, span.name, span.number), (0, -1))
            late = min(start, span.end) - span.start
            if late > 0 and rank != trace.rank:
                span = Span(*span[:6], late, rank)
        spans.append(span)
    return spans
