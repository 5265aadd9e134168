"""What a timeline comes to: where the time of a step goes, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from composable_shard.insight.timeline.rank_trace import RankTrace
from composable_shard.insight.timeline.spans import KINDS

MS = 1e6


def summarize(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the means over all steps, of each rank and over ranks.

    All but the memory in milliseconds of one step. What a rank does adds up to its step:
    ``forward``, ``backward`` and ``optimizer`` (together ``compute``), ``launch`` and ``copy`` of
    what is communicated, ``exposed`` waits, and ``other`` for what nobody tells: the loss, the next
    batch.
    ``late`` is the part of ``exposed`` in which another rank had not yet launched its part;
    ``communication`` is how long anything was under way, whatever went on meanwhile.
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
        "peak_nbytes": max(rank["peak_nbytes"] for rank in ranks),
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
        "peak_nbytes": max((sample.nbytes for sample in trace.memory), default=0),
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
