"""A folder of traces: what each rank wrote there, and what is made of it.

A process for each rank. Spans of one thread neither overlap nor nest, so that no viewer has to
guess; collectives that are under way at once get threads of their own. An arrow leads from the
launch of a collective to the wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from composable_shard.insight.timeline.analysis import (
    Lane,
    Shift,
    lanes_of,
    shifts,
    summarize,
    with_lateness,
)
from composable_shard.insight.timeline.page import to_html
from composable_shard.insight.timeline.recording import RankTrace, file_of, write
from composable_shard.insight.timeline.spans import Flight, Span

# The format of Chrome's traces, which https://ui.perfetto.dev opens -------------------------------

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
    place = {"pid": trace.rank, "tid": thread}
    for number, (start, end) in enumerate(lane.steps, trace.first_step):
        yield _slice(f"step {number}", "step", start, end, place)
    for span in lane.spans:
        yield _slice(*_words(span), span.start, span.end, place, _args_of(span))
        if span.kind == "wait" and span.number >= 0:
            yield {**_arrow(trace, span), **place, "ph": "f", "bp": "e", "ts": span.start / 1e3}
    waits = {(s.op, s.name, s.number) for s in trace.spans if s.kind == "wait" and s.number >= 0}
    for flight in lane.flights:
        title = f"{flight.op} {flight.name or 'root'}"
        nbytes = trace.groups[flight.name].nbytes
        args = {"group": flight.name, "unsharded bytes": nbytes}
        yield _slice(title, "communication", flight.start, flight.end, place, args)
        if flight[:3] in waits:
            yield {**_arrow(trace, flight), **place, "ph": "s", "ts": flight.start / 1e3}


def _words(span: Span) -> tuple[str, str]:
    """Return what a span is called, and its category."""
    name = span.name or "root"
    if span.kind in ("launch", "copy"):
        return f"{span.kind} {span.op} {name}", "communication"
    if span.kind == "wait":
        what = "copies" if span.op == "copies" else f"{span.op} {name}"
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
    number = f"{trace.rank} {what.op} {what.name} {what.number}"
    return {"cat": "communication", "name": "launch to wait", "id": number}


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
        """Put traces on one scale; see ``analysis.shifts``."""
        traces = sorted(traces, key=lambda trace: trace.rank)
        found = shifts(traces)
        begin = min(trace.begin + found[trace.clock].by for trace in traces)
        ranks = [trace.shifted(found[trace.clock].by - begin) for trace in traces]
        return cls(with_lateness(ranks), found)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Where the time of a step goes, in milliseconds; see ``analysis.summarize``."""
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
