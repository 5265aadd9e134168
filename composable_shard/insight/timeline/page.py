"""A page with the timeline of all ranks, in one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from composable_shard.insight.timeline.lanes import Lane, lanes_of
from composable_shard.insight.timeline.palette import COLORS, RANKS, WORDS
from composable_shard.insight.timeline.picture import to_svg
from composable_shard.insight.timeline.rank_trace import RankTrace

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
        ("<!--PICTURE-->", to_svg(traces)),
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
        "memory": [[sample.time / 1e3, sample.nbytes] for sample in trace.memory],
        "nbytes": {name: facts.nbytes for name, facts in trace.groups.items()},
    }


def _lane(lane: Lane) -> dict[str, Any]:
    """Return a lane whose items are ``[kind, group, start, end, act, late, late rank]``."""
    spans = [
        [s.kind, s.name, s.start / 1e3, s.end / 1e3, s.act, s.late / 1e3, s.late_rank]
        for s in lane.spans
    ]
    flights = [[f.act, f.name, f.start / 1e3, f.end / 1e3, f.act, 0, -1] for f in lane.flights]
    return {"title": lane.title, "kind": lane.kind, "items": spans + flights}
