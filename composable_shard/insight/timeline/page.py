"""A page with the timeline of all ranks, in one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from composable_shard.insight.timeline.analysis import Lane, lanes_of
from composable_shard.insight.timeline.recording import RankTrace
from composable_shard.insight.timeline.spans import Sample

COLORS = {
    "forward": "#3b82f6",
    "backward": "#8b5cf6",
    "optimizer": "#10b981",
    "launch": "#94a3b8",
    "copy": "#64748b",
    "wait": "#ef4444",
    "gather": "#06b6d4",
    "regather": "#22d3ee",
    "reduce": "#f59e0b",
    "all-reduce": "#d97706",
}
"""By what a rank does, and by what is under way."""

WORDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "launch": "launch",
    "copy": "copy",
    "wait": "exposed wait",
    "gather": "all-gather",
    "regather": "all-gather of kept parts",
    "reduce": "reduce-scatter",
    "all-reduce": "all-reduce",
}

RANKS = ("#0ea5e9", "#f97316", "#22c55e", "#e11d48", "#a855f7", "#eab308", "#14b8a6", "#64748b")
"""Of the memory curves; the ninth rank has the color of the first again."""

MAX_RANKS = 64  # with lanes of their own; the table has all


def to_html(traces: Sequence[RankTrace], summary: dict[str, Any]) -> str:
    """Return the page."""
    content = {
        "summary": summary,
        "colors": COLORS,
        "words": WORDS,
        "rankColors": RANKS,
        "ranks": [_rank(trace) for trace in traces[:MAX_RANKS]],
    }
    # Within a script, "<" could begin what ends it.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    page = _part("page.html")
    for mark, part in (
        ("/*STYLE*/", _part("page.css")),
        ("/*SCRIPT*/", _part("page.js")),
        ("/*CONTENT*/", text),
    ):
        page = page.replace(mark, part)
    return page


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


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
    spans = [
        [s.kind, s.name, s.start / 1e3, s.end / 1e3, s.op, s.late / 1e3, s.late_rank]
        for s in lane.spans
    ]
    flights = [[f.op, f.name, f.start / 1e3, f.end / 1e3, f.op, 0, -1] for f in lane.flights]
    return {"title": lane.title, "kind": lane.kind, "items": spans + flights}
