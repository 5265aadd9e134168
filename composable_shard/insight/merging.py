"""The timelines of all ranks: on one scale of time, summed up, shown, and merged in a folder.

A rank cannot have waited for a collective before every other has begun to launch it. So each
collective between two hosts bounds the difference of their clocks, from both sides since either
host waits for the other; ranks that are kept waiting make the bounds tight. The middle is taken,
which is off by no more than half the distance of the bounds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from composable_shard.insight.recording import (
    COMPUTE,
    KINDS,
    Flight,
    RankTrace,
    Sample,
    Span,
    file_of,
    write,
)

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


class Lane(NamedTuple):
    """What is drawn side by side; nothing in it overlaps.

    Attributes:
        title: What it is called.
        kind: ``steps``, ``compute``, ``waits``, ``gathers`` or ``reductions``.
        spans: What the rank did, or what was under way: then the kind of a span is its op.
    """

    title: str
    kind: str
    spans: Sequence[Span]


def lanes_of(trace: RankTrace) -> list[Lane]:
    """Return the lanes of a rank from the top down."""
    steps = enumerate(trace.intervals, trace.first_step) if trace.steps else ()
    lanes = [
        Lane("steps", "steps", [Span("step", str(number), *ends) for number, ends in steps]),
        Lane("compute", "compute", [span for span in trace.spans if span.kind != "wait"]),
        Lane("exposed waits", "waits", [span for span in trace.spans if span.kind == "wait"]),
    ]
    gathers = [flight for flight in trace.flights if flight.op in GATHERS]
    others = [flight for flight in trace.flights if flight.op not in GATHERS]
    for kind, flights in (("gathers", gathers), ("reductions", others)):
        for number, row in enumerate(side_by_side(flights) or [[]], 1):
            spans = [Span(one.op, one.name, one.start, one.end, one.op, one.number) for one in row]
            lanes.append(Lane(kind if number == 1 else f"{kind} {number}", kind, spans))
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
    times = dict.fromkeys(("step", "compute", *KINDS, "late", "other", "communication"), 0)
    times["step"] = end - begin
    for span in trace.spans:
        if begin <= span.start and span.end <= end:  # a mark of a step ends what is under way
            times[span.kind] += span.end - span.start
            times["late"] += span.late
    times["compute"] = sum(times[kind] for kind in COMPUTE)
    times["other"] = times["step"] - sum(times[kind] for kind in KINDS)
    flights = ((max(one.start, begin), min(one.end, end)) for one in trace.flights)
    under_way = times["communication"] = union_length(flights)
    exposed, step = times["wait"], times["step"]
    reserved = (sample.reserved or 0 for sample in trace.memory)
    return {
        "rank": trace.rank,
        **{
            f"{'exposed' if name == 'wait' else name}_ms": time / (MS * len(intervals))
            for name, time in times.items()
        },
        "exposed_share": exposed / step if step else 0.0,
        "hidden_share": max(0.0, 1 - exposed / under_way) if under_way else 1.0,
        "peak_nbytes": max((sample.nbytes for sample in trace.memory), default=0),
        "peak_reserved_nbytes": max(reserved, default=0),
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


# The format of Chrome's traces, which https://ui.perfetto.dev opens -------------------------------
#
# A process for each rank. Spans of one thread neither overlap nor nest, so that no viewer has to
# guess; collectives that are under way at once get threads of their own. An arrow leads from the
# launch of a collective to the wait for it.

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
    for time, *both in trace.memory:
        for kind, nbytes in zip(("live", "reserved"), both, strict=True):
            if nbytes is not None:
                place = {"ts": time / 1e3, "pid": rank, "tid": 0}
                name = f"{kind} memory ({trace.memory_of})"
                yield {"ph": "C", **place, "name": name, "args": {"bytes": nbytes}}


def _named(pid: int, tid: int, what: str, name: str) -> Event:
    place = {"ts": 0, "pid": pid, "tid": tid}
    return {"ph": "M", **place, "name": f"{what}_name", "args": {"name": name}}


def _of_lane(trace: RankTrace, lane: Lane, thread: int) -> Iterable[Event]:
    waits = {(one.op, one.name, one.number) for one in trace.spans if one.kind == "wait"}
    for span in lane.spans:
        name, category = _words(span)
        place = {"pid": trace.rank, "tid": thread, "ts": span.start / 1e3}
        drawn = {"name": name, "cat": category, "dur": (span.end - span.start) / 1e3}
        yield {"ph": "X", **place, **drawn, "args": _args_of(trace, span)}
        key = span.op, span.name, span.number
        if key in waits and span.number >= 0 and span.kind in ("wait", span.op):
            ends = {"ph": "f", "bp": "e"} if span.kind == "wait" else {"ph": "s"}
            number = " ".join(map(str, (trace.rank, *key)))
            arrow = {"cat": "communication", "name": "launch to wait", "id": number}
            yield {**arrow, **place, **ends}


def _words(span: Span) -> tuple[str, str]:
    """Return what a span is called, and its category."""
    name = span.name or "root"
    match span.kind:
        case "wait":
            what = "copies" if span.op == "copies" else f"{span.op} {name}"
            return f"wait for {what}", "exposed"
        case "launch" | "copy":
            return f"{span.kind} {span.op} {name}", "communication"
        case "step":
            return f"step {name}", "step"
    return f"{span.kind} {name}", "communication" if span.kind == span.op else "compute"


def _args_of(trace: RankTrace, span: Span) -> dict[str, Any]:
    if span.kind == "step":
        return {}
    if span.kind == span.op:
        return {"group": span.name, "unsharded bytes": trace.groups[span.name].nbytes}
    late = {"late rank": span.late_rank, "late ms": span.late / 1e6} if span.late else {}
    return {"group": span.name, **late}


# A page in one file that needs no network --------------------------------------------------------

MAX_RANKS = 64  # with lanes of their own; the table has all


def to_html(traces: Sequence[RankTrace], summary: dict[str, Any]) -> str:
    """Return the page."""
    content = {"summary": summary, "ranks": [_rank(trace) for trace in traces[:MAX_RANKS]]}
    # Within a script, "<" could begin what ends it.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    page, style, script = (
        files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css", "js")
    )
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    return page.replace("/*CONTENT*/", text)


def _rank(trace: RankTrace) -> dict[str, Any]:
    """Return what the script draws of a rank; times in microseconds."""
    return {
        "rank": trace.rank,
        "host": trace.host,
        "device": trace.device,
        "memoryOf": trace.memory_of,
        "firstStep": trace.first_step,
        "steps": [[start / 1e3, end / 1e3] for start, end in trace.intervals],
        "lanes": [_lane(lane) for lane in lanes_of(trace) if lane.kind != "steps"],
        "memory": [_sample(sample) for sample in trace.memory],
        "nbytes": {name: facts.nbytes for name, facts in trace.groups.items()},
    }


def _sample(sample: Sample) -> list[float]:
    """Return ``[time, live]`` or, on a device, ``[time, live, reserved]``."""
    time, *both = sample
    return [time / 1e3, *(nbytes for nbytes in both if nbytes is not None)]


def _lane(lane: Lane) -> dict[str, Any]:
    """Return a lane whose items are ``[kind, group, start, end, op, late, late rank]``."""
    items = [
        [one.kind, one.name, one.start / 1e3, one.end / 1e3, one.op, one.late / 1e3, one.late_rank]
        for one in lane.spans
    ]
    return {"title": lane.title, "kind": lane.kind, "items": items}


# A folder of traces: what each rank wrote there, and what is made of it ---------------------------

CHROME, PAGE = "trace.json", "timeline.html"
MERGED = (CHROME, PAGE)


@dataclass(frozen=True)
class MergedTrace:
    """The traces of some ranks on one scale of time, which begins with the first of them.

    Attributes:
        ranks: What each of them recorded, by rank.
        shifts: What was added to the times of each clock, but the begin of the scale.
    """

    ranks: list[RankTrace]
    shifts: dict[str, Shift]

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> MergedTrace:
        """Put traces on one scale; see :func:`shifts`."""
        traces = sorted(traces, key=lambda trace: trace.rank)
        found = shifts(traces)
        begin = min(trace.begin + found[trace.clock].by for trace in traces)
        ranks = [trace.shifted(found[trace.clock].by - begin) for trace in traces]
        return cls(with_lateness(ranks), found)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Where the time of a step goes, in milliseconds; see :func:`summarize`."""
        errors = [shift.error for shift in self.shifts.values()]
        exact = [error for error in errors if error is not None]
        clocks = {
            "num_clocks": len(errors),
            "clock_error_ms": max(exact) / 1e6 if len(exact) == len(errors) else None,
        }
        return summarize(self.ranks) | clocks

    def save(self, folder: str | Path) -> None:
        """Write all that there is to look at."""
        self.save_chrome(Path(folder) / CHROME)
        self.save_html(Path(folder) / PAGE)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev or ``chrome://tracing``."""
        write(Path(path), json.dumps(to_chrome(self.ranks), separators=(",", ":")))

    def save_html(self, path: str | Path) -> None:
        """Write a page that needs nothing but a browser."""
        write(Path(path), to_html(self.ranks, self.summary))


def merge(folder: str | Path, *others: str | Path) -> MergedTrace:
    """Merge what the ranks wrote into ``trace.json`` and ``timeline.html`` there.

    Ranks that wrote nothing, because they died or have a disk of their own, are left out and named
    in ``summary["missing_ranks"]``.

    Args:
        folder: The folder that was given to ``trace``.
        others: More such folders, where ranks have disks of their own.

    Returns:
        The ranks on one scale of time.

    Raises:
        ValueError: If no rank wrote there, or a file is not what a rank writes.

    Collective: none.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, fake_ranks(2):
        ...     with trace(fully_shard(nn.Linear(4, 4)), folder):
        ...         pass
        ...     merge(folder).summary["missing_ranks"]
        [1]
    """
    merged = read(folder, *others)
    merged.save(folder)
    return merged


def read(*folders: str | Path) -> MergedTrace:
    """Return what :func:`merge` does, and write nothing."""
    paths = sorted(path for folder in folders for path in Path(folder).glob("rank-*.json"))
    if not paths:
        where = ", ".join(map(str, folders))
        raise ValueError(f"Expected files of ranks (rank-00000.json) in {where}, got none")
    traces = [RankTrace.from_json(path.read_text(), str(path)) for path in paths]
    num_ranks = max(traces, key=lambda trace: trace.wall).num_ranks
    return MergedTrace.of([trace for trace in traces if trace.num_ranks == num_ranks])


def is_complete(folder: Path, num_ranks: int) -> bool:
    """Tell whether all ranks have written."""
    return all(file_of(folder, rank).exists() for rank in range(num_ranks))


def clear(folder: Path, rank: int, num_ranks: int) -> None:
    """Remove what an earlier run left: each rank its own, the first one what is nobody's."""
    folder.mkdir(parents=True, exist_ok=True)
    file_of(folder, rank).unlink(missing_ok=True)
    if rank == 0:
        left = [path for path in folder.glob("rank-*.json") if _rank_of(path) >= num_ranks]
        for path in [*left, *(folder / name for name in MERGED)]:
            path.unlink(missing_ok=True)


def _rank_of(path: Path) -> int:
    digits = path.stem.removeprefix("rank-")
    return int(digits) if digits.isdigit() else 0
