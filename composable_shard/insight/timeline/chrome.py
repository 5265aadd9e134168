"""The format of Chrome's traces, which https://ui.perfetto.dev opens.

A process for each rank. Spans of one thread neither overlap nor nest, so that no viewer has to
guess; collectives that are under way at once get threads of their own. An arrow leads from the
launch of a collective to the wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from composable_shard.insight.timeline.lanes import Lane, lanes_of
from composable_shard.insight.timeline.rank_trace import RankTrace
from composable_shard.insight.timeline.spans import Flight, Span
from composable_shard.insight.timeline.summary import summarize

Event = dict[str, Any]


def to_chrome(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return what ``json.dump`` writes to a file for Perfetto or ``chrome://tracing``."""
    events = [event for trace in traces for event in _of_rank(trace)]
    order = {"M": 0}
    events.sort(key=lambda event: (order.get(event["ph"], 1), event["ts"]))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "composable_shard.trace", "summary": summarize(traces)},
    }


def _of_rank(trace: RankTrace) -> Iterable[Event]:
    rank = trace.rank
    yield _named(rank, 0, "process", f"rank {rank} ({trace.device})")
    for thread, lane in enumerate(lanes_of(trace)):
        yield _named(rank, thread, "thread", lane.title)
        yield from _of_lane(trace, lane, thread)
    for sample in trace.memory:
        name, args = f"live memory ({trace.memory_of})", {"bytes": sample.nbytes}
        yield {
            "ph": "C",
            "ts": sample.time / 1e3,
            "pid": rank,
            "tid": 0,
            "name": name,
            "args": args,
        }


def _named(pid: int, tid: int, what: str, name: str) -> Event:
    place = {"ts": 0, "pid": pid, "tid": tid}
    return {"ph": "M", **place, "name": f"{what}_name", "args": {"name": name}}


def _of_lane(trace: RankTrace, lane: Lane, thread: int) -> Iterable[Event]:
    place = {"pid": trace.rank, "tid": thread}
    for number, (start, end) in enumerate(lane.steps, trace.first_step):
        yield _slice(f"step {number}", "step", start, end, place)
    for span in lane.spans:
        yield _slice(*_words(span), span.start, span.end, place, _args_of(span))
        if span.kind == "wait" and span.number >= 0:
            yield {**_arrow(trace, span), **place, "ph": "f", "bp": "e", "ts": span.start / 1e3}
    waits = {(s.act, s.name, s.number) for s in trace.spans if s.kind == "wait" and s.number >= 0}
    for flight in lane.flights:
        title = f"{flight.act} {flight.name or 'root'}"
        nbytes = trace.groups[flight.name].nbytes
        args = {"group": flight.name, "unsharded bytes": nbytes}
        yield _slice(title, "communication", flight.start, flight.end, place, args)
        if flight[:3] in waits:
            yield {**_arrow(trace, flight), **place, "ph": "s", "ts": flight.start / 1e3}


def _words(span: Span) -> tuple[str, str]:
    """Return what a span is called, and its category."""
    name = span.name or "root"
    if span.kind in ("launch", "copy"):
        return f"{span.kind} {span.act} {name}", "communication"
    if span.kind == "wait":
        what = "others to read" if span.act == "readers" else f"{span.act} {name}"
        return f"wait for {what}", "exposed"
    return f"{span.kind} {name}", "compute"


def _args_of(span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {"group": span.name}
    if span.late:
        args |= {"late rank": span.late_rank, "late ms": span.late / 1e6}
    return args


def _slice(
    name: str,
    category: str,
    start: int,
    end: int,
    place: dict[str, int],
    args: dict[str, Any] | None = None,
) -> Event:
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "cat": category, **times, **place, "args": args or {}}


def _arrow(trace: RankTrace, what: Span | Flight) -> Event:
    number = f"{trace.rank} {what.act} {what.name} {what.number}"
    return {"cat": "communication", "name": "launch to wait", "id": number}
