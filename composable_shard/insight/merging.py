"""The timelines of all ranks: aligned in time, summarized, drawn, and merged in a folder.

At every moment a rank does one thing, so its spans neither overlap nor nest. A flight is a
collective, from the start of its launch until its result has been waited for. Flights overlap with
spans.

A rank cannot finish waiting for a collective before every other rank has begun to launch it. So
each collective between two hosts bounds the difference of their clocks, from both sides since each
host waits for the other; ranks that have to wait make the bounds tight. The middle of the bounds is
off by no more than half their distance.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

# The recording of one rank, and its file ----------------------------------------------------------

COMPUTE = ("forward", "backward", "optimizer")
KINDS = (*COMPUTE, "launch", "copy", "wait")
"""Kinds of spans: compute, the launch of a collective, the copy of its result to its place, and
waits, in which nothing is computed: exposed communication."""


class Span(NamedTuple):
    """The work of a rank, or a collective in flight, from ``start`` to ``end``.

    Attributes:
        kind: One of ``KINDS``; of a flight its op.
        name: The group, or the class of the optimizer.
        start: Nanoseconds.
        end: Nanoseconds.
        op: The collective that is launched, waited for or copied, one of the values of ``OPS``;
            ``copies`` where a rank waits for all copies between host and device.
        number: The number of earlier flights of this op and group; -1 for work without a flight.
        late: Nanoseconds of a wait before the last rank launched the collective.
        late_rank: That rank; -1 if none was late.
    """

    kind: str
    name: str
    start: int = 0
    end: int = 0
    op: str = ""
    number: int = -1
    late: int = 0
    late_rank: int = -1


class Sample(NamedTuple):
    """The memory at one moment.

    Attributes:
        time: Nanoseconds.
        nbytes: Live bytes.
        reserved: Bytes that the caching allocator has taken from the device; ``None`` on the CPU.
    """

    time: int
    nbytes: int
    reserved: int | None = None


FORMAT = "composable_shard.trace 2"
Collective = tuple[int, str, str, int]
"""The first of the ranks that take part, the op, the group and the number of its flight: the same
on all ranks that take part."""


class GroupFacts(NamedTuple):
    """Facts about a group.

    Attributes:
        nbytes: Bytes of its parameters when they are gathered.
        first_of_shards: The first of the ranks that share them.
        first_of_replicas: The first of the ranks that hold the same shards as this one.
    """

    nbytes: int
    first_of_shards: int
    first_of_replicas: int


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank; all times are nanoseconds of its host's monotonic clock.

    Attributes:
        rank: The rank.
        num_ranks: The number of ranks of the job.
        clock: Identifies the clock: ranks with the same value share one.
        device: The device of compute.
        memory_of: The memory that is counted: ``device``, ``heap`` or ``nothing``.
        groups: The groups of the model.
        wall: Nanoseconds since 1970 when that clock showed ``begin``.
        begin: The start of the recording.
        end: Its end.
        first_step: The number of the first recorded step.
        steps: The end of each step.
        spans: The work of the rank, in order.
        flights: Its collectives.
        memory: Live and reserved memory.
    """

    rank: int
    num_ranks: int
    clock: str
    device: str
    memory_of: str
    groups: dict[str, GroupFacts]
    wall: int = 0
    begin: int = 0
    end: int = 0
    first_step: int = 0
    steps: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[Span] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """Begin and end of each step; the whole recording is one if no step was marked."""
        ends = self.steps or [self.end]
        return list(zip([self.begin, *ends[:-1]], ends, strict=True))

    def shifted(self, by: int) -> RankTrace:
        """Return the same, ``by`` nanoseconds later."""

        def later(spans: list[Span]) -> list[Span]:
            return [span._replace(start=span.start + by, end=span.end + by) for span in spans]

        return replace(
            self,
            begin=self.begin + by,
            end=self.end + by,
            steps=[step + by for step in self.steps],
            spans=later(self.spans),
            flights=later(self.flights),
            memory=[sample._replace(time=sample.time + by) for sample in self.memory],
        )

    def facts_of(self, name: str) -> GroupFacts:
        """Return the facts about a group.

        Nothing is known of a group that had another name when the recording began, because its tree
        has been sharded further since.
        """
        return self.groups.get(name, GroupFacts(0, self.rank, self.rank))

    def collective_of(self, of: Span) -> Collective:
        """Return the collective that a flight, or the wait for it, belongs to."""
        _, shards, replicas = self.facts_of(of.name)
        return replicas if of.op == "all-reduce" else shards, of.op, of.name, of.number

    def to_json(self) -> str:
        """Return the text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> RankTrace:
        """Return the recording that :meth:`to_json` wrote.

        Raises:
            ValueError: If the text is not the file of a rank.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                expected = f"Expected the format '{FORMAT}'"
                raise ValueError(expected)
            groups = values["groups"].items()
            values["groups"] = {name: GroupFacts(*facts) for name, facts in groups}
            for field, kind in (("spans", Span), ("flights", Span), ("memory", Sample)):
                values[field] = [kind(*fields) for fields in values[field]]
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Expected the trace of a rank in {source}, got {error!r}") from error


def file_of(folder: Path, rank: int) -> Path:
    """Return the file that a rank writes."""
    return folder / f"rank-{rank:05d}.json"


def write(path: Path, text: str) -> None:
    """Write a file so that it exists whole or not at all, even if others write it too."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    unfinished.write_text(text)
    unfinished.replace(path)


# The clocks of several hosts on one scale, without a message --------------------------------------


class Shift(NamedTuple):
    """The correction of a clock.

    Attributes:
        by: Nanoseconds to add to its times.
        error: The uncertainty in nanoseconds; infinite if only the wall clocks of the hosts align
            them.
    """

    by: int
    error: float


class Part(NamedTuple):
    """The part of one rank in a collective.

    Attributes:
        start: Nanoseconds.
        rank: The rank.
        clock: Its clock.
        end: Nanoseconds.
    """

    start: int
    rank: int
    clock: str
    end: int


def _collectives(traces: Iterable[RankTrace]) -> Mapping[Collective, list[Part]]:
    """Return all collectives but gathers of kept parts, which only wait for the neighbours."""
    found: dict[Collective, list[Part]] = defaultdict(list)
    for trace in traces:
        for flight in trace.flights:
            if flight.op != "regather":
                part = Part(flight.start, trace.rank, trace.clock, flight.end)
                found[trace.collective_of(flight)].append(part)
    return found


def shifts(traces: Sequence[RankTrace]) -> dict[str, Shift]:
    """Return the shift of each clock that puts its times on the scale of the first trace.

    Clocks are joined to that scale one after the other, the one with the tightest bounds first.
    """
    bounds = _bounds(traces)
    first = traces[0]
    joined = {first.clock: Shift(0, 0)}
    walls = {trace.clock: trace.wall - trace.begin for trace in reversed(traces)}
    while others := walls.keys() - joined.keys():
        width, clock, beside = min(
            (bounds[one, other] + bounds[other, one], other, one)
            for one in joined
            for other in others
        )
        if math.isinf(width):
            joined[clock] = Shift(walls[clock] - walls[first.clock], math.inf)
            continue
        middle, known = (bounds[clock, beside] - bounds[beside, clock]) / 2, joined[beside]
        joined[clock] = Shift(known.by + round(middle), known.error + abs(width / 2))
    return joined


def _bounds(traces: Sequence[RankTrace]) -> Mapping[tuple[str, str], float]:
    """Return for two clocks the most that the second may be behind the first.

    ``bounds[a, b]`` is the least ``end on b - start on a`` of their collectives: a larger shift of
    a would let a collective end on b before it has begun on a.
    """
    bounds: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for parts in _collectives(traces).values():
        starts = {part.clock: part.start for part in sorted(parts)}  # the last of each clock
        from_last = sorted(parts, key=attrgetter("end"), reverse=True)
        ends = {part.clock: part.end for part in from_last}  # the first of each clock
        for one, start in starts.items():
            for other, end in ends.items():
                bounds[one, other] = min(bounds[one, other], end - start)
    return bounds


# Whether a rank waited for the network or for another rank ----------------------------------------


def with_lateness(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Add to every wait the rank that launched last, and the time until it did.

    Args:
        traces: Of all ranks, by one clock.
    """
    last = {collective: max(parts) for collective, parts in _collectives(traces).items()}

    def late(trace: RankTrace, span: Span) -> Span:
        part = last.get(trace.collective_of(span))
        if span.kind != "wait" or part is None or part.rank == trace.rank:
            return span
        late = min(part.start, span.end) - span.start
        return span._replace(late=late, late_rank=part.rank) if late > 0 else span

    return [replace(trace, spans=[late(trace, s) for s in trace.spans]) for trace in traces]


# The lanes of one rank ----------------------------------------------------------------------------

GATHERS = ("gather", "regather")


class Lane(NamedTuple):
    """Spans that are drawn side by side, since none of them overlap.

    Attributes:
        title: Its title.
        kind: ``steps``, ``compute``, ``waits``, ``gathers`` or ``reductions``.
        spans: The spans.
    """

    title: str
    kind: str
    spans: Sequence[Span]


def lanes_of(trace: RankTrace) -> list[Lane]:
    """Return the lanes of a rank from the top down: its steps, its work, then its flights."""
    steps = enumerate(trace.intervals, trace.first_step) if trace.steps else ()
    lanes = [
        Lane("steps", "steps", [Span("step", str(number), *ends) for number, ends in steps]),
        Lane("compute", "compute", [span for span in trace.spans if span.kind != "wait"]),
        Lane("exposed waits", "waits", [span for span in trace.spans if span.kind == "wait"]),
    ]
    for kind, is_gather in (("gathers", True), ("reductions", False)):
        flights = [flight for flight in trace.flights if (flight.op in GATHERS) is is_gather]
        for number, row in enumerate(side_by_side(flights) or [[]], 1):
            lanes.append(Lane(kind if number == 1 else f"{kind} {number}", kind, row))
    return lanes


def side_by_side(flights: Iterable[Span]) -> list[list[Span]]:
    """Put flights into as few rows as possible so that none overlap in a row.

    Example:
        >>> flights = [Span("gather", "0", i, i + 2) for i in range(3)]
        >>> [[flight.start for flight in row] for row in side_by_side(flights)]
        [[0, 2], [1]]
    """
    rows: list[list[Span]] = []
    for flight in sorted(flights, key=attrgetter("start", "end")):
        row = next((row for row in rows if row[-1].end <= flight.start), None)
        if row is None:
            rows.append(row := [])
        row.append(flight)
    return rows


# Sums over a timeline: where the time of a step goes, and how much memory it takes ----------------

MS = 1e6


def _summarize_rank(trace: RankTrace) -> dict[str, Any]:
    intervals = trace.intervals
    begin, end = intervals[0][0], intervals[-1][1]
    times = dict.fromkeys((*KINDS, "late"), 0)
    for span in trace.spans:
        if begin <= span.start and span.end <= end:  # the mark of a step ends every span
            times[span.kind] += span.end - span.start
            times["late"] += span.late
    flights = ((max(f.start, begin), min(f.end, end)) for f in trace.flights)
    step, in_flight = end - begin, union_length(flights)
    times["compute"] = sum(times[kind] for kind in COMPUTE)
    times["other"] = step - sum(times[kind] for kind in KINDS)
    times["step"], times["communication"] = step, in_flight
    exposed = times["exposed"] = times.pop("wait")
    reserved = (sample.reserved or 0 for sample in trace.memory)
    return {
        "rank": trace.rank,
        **{f"{name}_ms": time / (MS * len(intervals)) for name, time in times.items()},
        "exposed_share": exposed / step if step else 0.0,
        "hidden_share": max(0.0, 1 - exposed / in_flight) if in_flight else 1.0,
        "peak_nbytes": max((sample.nbytes for sample in trace.memory), default=0),
        "peak_reserved_nbytes": max(reserved, default=0),
    }


def union_length(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of ranges.

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
# guess; collectives that are in flight at once get threads of their own. An arrow leads from the
# launch of a collective to the wait for it.

Event = dict[str, Any]


def to_chrome(traces: Sequence[RankTrace], summary: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file for Perfetto or ``chrome://tracing``."""
    events = [event for trace in traces for event in _events_of(trace)]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "composable_shard.trace", "summary": summary},
    }


def _events_of(trace: RankTrace) -> Iterator[Event]:
    def event(phase: str, thread: int, moment: int, **facts: Any) -> Event:
        return {"ph": phase, "pid": trace.rank, "tid": thread, "ts": moment / 1e3, **facts}

    process = {"name": f"rank {trace.rank} ({trace.device})"}
    yield event("M", 0, 0, name="process_name", args=process)
    waits = {(s.op, s.name, s.number) for s in trace.spans if s.kind == "wait" and s.number >= 0}
    for thread, lane in enumerate(lanes_of(trace)):
        yield event("M", thread, 0, name="thread_name", args={"name": lane.title})
        for span in lane.spans:
            name, category = _words(span)
            facts = {"dur": (span.end - span.start) / 1e3, "args": _args_of(trace, span)}
            yield event("X", thread, span.start, name=name, cat=category, **facts)
            key = span.op, span.name, span.number
            if key in waits and span.kind in ("wait", span.op):
                arrow = {"cat": "communication", "name": "launch to wait"}
                arrow["id"] = " ".join(map(str, (trace.rank, *key)))
                end = {"ph": "f", "bp": "e"} if span.kind == "wait" else {"ph": "s"}
                yield {**event("", thread, span.start, **arrow), **end}
    for moment, *both in trace.memory:
        for kind, nbytes in zip(("live", "reserved"), both, strict=True):
            if nbytes is not None:
                name = f"{kind} memory ({trace.memory_of})"
                yield event("C", 0, moment, name=name, args={"bytes": nbytes})


def _words(span: Span) -> tuple[str, str]:
    """Return the text on a span, and its category."""
    name = span.name or "root"
    if span.kind == "wait":
        return f"wait for {span.op if span.op == 'copies' else f'{span.op} {name}'}", "exposed"
    if span.kind in ("launch", "copy"):
        return f"{span.kind} {span.op} {name}", "communication"
    if span.kind == "step":
        return f"step {name}", "step"
    return f"{span.kind} {name}", "communication" if span.kind == span.op else "compute"


def _args_of(trace: RankTrace, span: Span) -> dict[str, Any]:
    if span.kind == "step":
        return {}
    if span.kind == span.op:
        return {"group": span.name, "unsharded bytes": trace.facts_of(span.name).nbytes}
    late = {"late rank": span.late_rank, "late ms": span.late / MS} if span.late else {}
    return {"group": span.name, **late}


# A page in one file that needs no network --------------------------------------------------------

MAX_RANKS = 64  # with lanes of their own; the table has all


def to_html(traces: Sequence[RankTrace], summary: dict[str, Any]) -> str:
    """Return the page."""
    ranks = [
        {
            "rank": trace.rank,
            "device": trace.device,
            "intervals": trace.intervals,
            "lanes": [lane._asdict() for lane in lanes_of(trace)[1:]],  # steps have no lane
            "memory": trace.memory,
            "groups": trace.groups,
        }
        for trace in traces[:MAX_RANKS]
    ]
    # Within a script, "<" could begin the end of the script.
    text = json.dumps({"summary": summary, "ranks": ranks}, separators=(",", ":"))
    page, style, script = (
        files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css", "js")
    )
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    return page.replace("/*CONTENT*/", text.replace("<", "\\u003c"))


# A folder of traces: the files of the ranks, and the merged files ---------------------------------

CHROME, PAGE = "trace.json", "timeline.html"
MERGED = (CHROME, PAGE)


@dataclass(frozen=True)
class MergedTrace:
    """The traces of some ranks on one scale of time, which begins with the first of them.

    Attributes:
        ranks: The recording of each of them, by rank.
        shifts: The correction of each clock, without the start of the scale.
    """

    ranks: list[RankTrace]
    shifts: dict[str, Shift]

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> MergedTrace:
        """Put traces on one scale; see :func:`shifts`."""
        traces = sorted(traces, key=attrgetter("rank"))
        found = shifts(traces)
        begin = min(trace.begin + found[trace.clock].by for trace in traces)
        ranks = [trace.shifted(found[trace.clock].by - begin) for trace in traces]
        return cls(with_lateness(ranks), found)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The means over all steps, of each rank and over ranks.

        Times are milliseconds of one step. The parts of a step add up to it: ``forward``,
        ``backward`` and ``optimizer`` (together ``compute``), ``launch`` and ``copy`` of
        collectives, ``exposed`` waits, and ``other`` for everything that no event marks: the loss,
        the next batch. ``late`` is the part of ``exposed`` in which another rank had not yet
        launched its part; ``communication`` is the time in which anything was in flight, also
        beside compute.

        ``exposed_share`` is the share of the step that is exposed; ``hidden_share`` the share of
        the communication that is not. ``peak_nbytes`` is the peak of live memory;
        ``peak_reserved_nbytes`` that of the memory reserved by the caching allocator of a device, 0
        where there is none. ``clock_error_ms`` is the uncertainty of the clocks, ``None`` if only
        wall clocks align the hosts.
        """
        ranks = [_summarize_rank(trace) for trace in self.ranks]
        first = self.ranks[0]
        error = max(shift.error for shift in self.shifts.values())
        columns = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        averaged = [name for name in columns if name.endswith(("_ms", "_share"))]
        return {
            "num_ranks": first.num_ranks,
            "missing_ranks": sorted({*range(first.num_ranks)} - {*columns["rank"]}),
            "num_steps": min(len(trace.steps) for trace in self.ranks),
            "first_step": first.first_step,
            **{name: max(column) for name, column in columns.items() if "peak" in name},
            **{name: sum(columns[name]) / len(ranks) for name in averaged},
            "memory_of": first.memory_of,
            "ranks": ranks,
            "num_clocks": len(self.shifts),
            "clock_error_ms": None if math.isinf(error) else error / MS,
        }

    def save(self, folder: str | Path) -> None:
        """Write the trace and the page, under the names that :func:`merge` gives them."""
        self.save_chrome(Path(folder) / CHROME)
        self.save_html(Path(folder) / PAGE)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev or ``chrome://tracing``."""
        content = to_chrome(self.ranks, self.summary)
        write(Path(path), json.dumps(content, separators=(",", ":")))

    def save_html(self, path: str | Path) -> None:
        """Write a page that needs nothing but a browser."""
        write(Path(path), to_html(self.ranks, self.summary))


def merge(folder: str | Path, *others: str | Path) -> MergedTrace:
    """Merge the files of the ranks into ``trace.json`` and ``timeline.html`` in the folder.

    Ranks that wrote nothing, because they died or have a disk of their own, are left out and named
    in ``summary["missing_ranks"]``.

    Args:
        folder: The folder that was given to ``trace``.
        others: More such folders, where ranks have disks of their own.

    Returns:
        The ranks on one scale of time.

    Raises:
        ValueError: If no rank wrote there, or a file is not the file of a rank.

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
    """Return the ranks as :func:`merge` does, and write nothing."""
    paths = sorted(path for folder in folders for path in Path(folder).glob("rank-*.json"))
    if not paths:
        where = ", ".join(map(str, folders))
        raise ValueError(f"Expected files of ranks (rank-00000.json) in {where}, got none")
    traces = [RankTrace.from_json(path.read_text(), str(path)) for path in paths]
    num_ranks = max(traces, key=attrgetter("wall")).num_ranks
    return MergedTrace.of([trace for trace in traces if trace.num_ranks == num_ranks])


def clear(folder: Path, rank: int, num_ranks: int) -> None:
    """Remove the files of an earlier run: each rank its own, the first one also all others."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [file_of(folder, rank)]
    if rank == 0:
        after_last = file_of(folder, num_ranks)
        left += [path for path in folder.glob("rank-[0-9]*.json") if path >= after_last]
        left += [folder / name for name in MERGED]
    for path in left:
        path.unlink(missing_ok=True)
