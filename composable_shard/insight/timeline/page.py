"""A page with the timeline of all ranks, and a picture of one step for a README."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from composable_shard.insight.timeline.analysis import Lane, lanes_of, summarize_rank
from composable_shard.insight.timeline.recording import RankTrace
from composable_shard.insight.timeline.spans import Sample

# The colors and words of the picture and of the page ----------------------------------------------

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

MIB = 2**20


def nice_step(span: float, num: int) -> float:
    """Return the round number of which about ``num`` make up ``span``.

    Example:
        >>> nice_step(97.0, 5), nice_step(0.3, 5)
        (20.0, 0.05)
    """
    rough = max(span, 1e-9) / num
    power = 1.0
    while power > rough:
        power /= 10
    while power * 10 <= rough:
        power *= 10
    best = min((1, 2, 5, 10), key=lambda factor: abs(power * factor - rough))
    return round(power * best, 12)


# A picture of one step as SVG: for a README, which runs no scripts --------------------------------

WIDTH, LEFT, RIGHT = 1200, 118, 28
HEADER = 96
HEIGHTS = {"compute": 26, "waits": 12, "gathers": 12, "reductions": 12}
LANE_GAP, RANK_GAP = 4, 22
MEMORY_HEIGHT = 120
CHAR = 6.3  # the width of a small letter, about
MAX_DRAWN_RANKS = 8

STYLE = """
text { font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial,
  sans-serif; font-size: 11.5px; fill: #475569 }
.title { font-size: 19px; font-weight: 650; fill: #0f172a }
.lead { font-size: 13px; fill: #475569 }
.rank { font-size: 13px; font-weight: 650; fill: #0f172a }
.in { fill: #ffffff; font-size: 11px; font-weight: 550 }
.card { fill: #ffffff; stroke: #e2e8f0 }
.lane { fill: #f1f5f9 }
.grid { stroke: #e2e8f0; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #94a3b8 }
  .title, .rank { fill: #f1f5f9 }
  .lead { fill: #94a3b8 }
  .in { fill: #ffffff }
  .card { fill: #0f172a; stroke: #1e293b }
  .lane { fill: #1e293b }
  .grid { stroke: #263449 }
}
"""


class Window(NamedTuple):
    """The time that is shown."""

    begin: int
    end: int

    def x(self, time: float) -> float:
        """Return where a moment is drawn."""
        share = (time - self.begin) / max(self.end - self.begin, 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def to_svg(traces: Sequence[RankTrace], step: int = -1) -> str:
    """Return the picture of one step on the first ranks.

    Args:
        traces: The ranks, on one scale of time.
        step: Which of the recorded steps; negative numbers count from the last.

    Raises:
        ValueError: If there is no such step.
    """
    num_steps = min(len(trace.intervals) for trace in traces)
    if not -num_steps <= step < num_steps:
        raise ValueError(f"Expected a step within the {num_steps} recorded ones, got {step}")
    step %= num_steps
    shown = list(traces[:MAX_DRAWN_RANKS])
    window = Window(
        min(trace.intervals[step][0] for trace in shown),
        max(trace.intervals[step][1] for trace in shown),
    )
    header = _header(shown, len(traces), step, window)
    top = float(HEADER)
    behind: list[str] = []
    before: list[str] = []
    for trace in shown:
        lanes, bars, top = _drawn_rank(trace, window, top)
        behind += lanes
        before += bars
    parts = [*header, *behind, *_time_axis(window, HEADER, top), *before]
    top += 34
    if any(trace.memory for trace in shown):
        parts += _memory(shown, window, top)
        top += MEMORY_HEIGHT + 40
    box = f'viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" height="{top:.0f}"'
    card = (
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{top - 1:.0f}" rx="12"/>'
    )
    title = (
        "<title>Timeline of one training step</title>\n"
        "<desc>For each rank what it computes, where it waits, which gathers and reductions are "
        "under way meanwhile, and how much memory is live.</desc>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            *(title, f"<style>{STYLE}</style>", card, *parts, "</svg>", ""),
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, look: str, title: str = "") -> str:
    box = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{height:.1f}"'
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f"<rect {box} {look}>{inner}</rect>"


def _header(
    traces: Sequence[RankTrace], num_ranks: int, step: int, window: Window
) -> Iterable[str]:
    sums = [summarize_rank(trace) for trace in traces]
    length = (window.end - window.begin) / 1e6
    number = traces[0].first_step + step
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    is_step = bool(traces[0].steps)
    yield _text(24, 36, f"One training step on {ranks}" if is_step else ranks, "title")
    waits = [
        span.end - span.start
        for trace in traces
        for span in trace.spans
        if span.kind == "wait" and window.begin <= span.start < window.end
    ]
    exposed = sum(waits) / len(traces) / max(window.end - window.begin, 1)
    words = [
        f"step {number}: {length:.1f} ms" if is_step else f"{length:.1f} ms",
        f"exposed communication: {exposed:.0%} of the step",
    ]
    peak = max(one["peak_nbytes"] for one in sums)
    if peak:
        words.append(f"peak memory {peak / MIB:,.0f} MiB")
    yield _text(24, 58, "  ·  ".join(words), "lead")
    x = 24.0
    used = {flight.act for trace in traces for flight in trace.flights}
    used |= {span.kind for trace in traces for span in trace.spans}
    for name in (name for name in COLORS if name in used):
        yield _rect(x, 72, 10, 10, f'rx="2.5" fill="{COLORS[name]}"')
        yield _text(x + 15, 81, WORDS[name])
        x += 15 + len(WORDS[name]) * CHAR + 18


def _drawn_rank(trace: RankTrace, window: Window, top: float) -> tuple[list[str], list[str], float]:
    """Return the lanes of a rank, what is in them, and where the next rank begins."""
    lanes = [lane for lane in lanes_of(trace) if lane.kind != "steps"]
    first, parts = top, [_text(24, top + 17, f"rank {trace.rank}", "rank")]
    bars: list[str] = []
    for lane in lanes:
        height = HEIGHTS[lane.kind]
        if lane.kind != "compute":
            label = "waits" if lane.kind == "waits" else lane.title
            parts.append(_text(LEFT - 8, top + height - 2, label, anchor="end"))
        parts.append(_rect(LEFT, top, WIDTH - LEFT - RIGHT, height, 'class="lane" rx="2"'))
        bars += _drawn_lane(lane, window, top)
        top += height + LANE_GAP
    for span in trace.spans:
        if span.kind == "wait" and window.begin <= span.start and span.end <= window.end:
            x, end = window.x(span.start), window.x(span.end)
            look = f'fill="{COLORS["wait"]}" opacity="0.10"'
            bars.append(_rect(x, first, end - x, top - LANE_GAP - first, look))
    return parts, bars, top + RANK_GAP - LANE_GAP


def _drawn_lane(lane: Lane, window: Window, top: float) -> Iterable[str]:
    height = HEIGHTS[lane.kind]
    drawn = [(span.kind, span.name, span.start, span.end) for span in lane.spans]
    flown = [(flight.act, flight.name, flight.start, flight.end) for flight in lane.flights]
    for kind, name, began, ended in (*drawn, *flown):
        start, end = max(began, window.begin), min(ended, window.end)
        if start >= end:
            continue
        x, width = window.x(start), window.x(end) - window.x(start)
        look = f'fill="{COLORS[kind]}" rx="{min(2.5, width / 4):.1f}"'
        shown = f"{WORDS[kind]} {name or 'root'}: {(ended - began) / 1e6:.3f} ms"
        yield _rect(x, top, width, height, look, shown)
        if lane.kind == "compute" and kind not in ("launch", "copy"):
            label = fitting(name or "root", width - 8)
            if label:
                yield _text(x + width / 2, top + 17, label, "in", "middle")


def fitting(name: str, width: float) -> str:
    """Return the name, its last part, or nothing, whichever fits into some pixels.

    Example:
        >>> fitting("layers.10", 80), fitting("layers.10", 20), fitting("layers.10", 5)
        ('layers.10', '10', '')
    """
    for text in (name, name.rpartition(".")[2]):
        if len(text) * CHAR <= width:
            return text
    return ""


def _time_axis(window: Window, top: float, bottom: float) -> Iterable[str]:
    length = (window.end - window.begin) / 1e6
    step = nice_step(length, 10)
    bottom -= RANK_GAP - 6
    for tick in range(int(length / step + 1e-9) + 1):
        x = window.x(window.begin + tick * step * 1e6)
        yield f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
        yield _text(x, bottom + 15, f"{tick * step:g} ms", anchor="middle")


def _memory(traces: Sequence[RankTrace], window: Window, top: float) -> Iterable[str]:
    curves = [(trace, _within(trace.memory, window)) for trace in traces]
    values = [sample.nbytes / MIB for _, curve in curves for sample in curve] or [0.0]
    step = nice_step(max(values), 4)
    high = (int(max(values) / step) + 1) * step
    yield _text(24, top + 6, "live memory", "rank")
    top += 20

    def y(nbytes: float) -> float:
        return top + MEMORY_HEIGHT * (1 - nbytes / MIB / high)

    for tick in range(round(high / step) + 1):
        level = y(tick * step * MIB)
        yield f'<path class="grid" d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}"/>'
        yield _text(LEFT - 8, level + 4, f"{tick * step:g} MiB", anchor="end")
    x = float(LEFT + 8)
    for trace, curve in curves:
        color = RANKS[trace.rank % len(RANKS)]
        path = _steps(curve, window, y)
        if path:
            base = top + MEMORY_HEIGHT
            area = f"{path}V{base:.1f}H{window.x(curve[0].time):.1f}Z"
            yield f'<path d="{area}" fill="{color}" opacity="0.08"/>'
            yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        yield _rect(x, top - 20, 12, 3, f'fill="{color}"')
        yield _text(x + 17, top - 14, f"rank {trace.rank}")
        x += 72


def _steps(curve: Sequence[Sample], window: Window, y: object) -> str:
    """Return a path that keeps each value until the next."""
    if not curve or not callable(y):
        return ""
    path = f"M{window.x(curve[0].time):.1f} {y(curve[0].nbytes):.1f}"
    for sample in curve[1:]:
        path += f"H{window.x(sample.time):.1f}V{y(sample.nbytes):.1f}"
    return f"{path}H{window.x(window.end):.1f}"


def _within(memory: Sequence[Sample], window: Window) -> list[Sample]:
    """Return the samples in the window, with the last one before it at its begin."""
    before = [sample for sample in memory if sample.time <= window.begin][-1:]
    inside = [sample for sample in memory if window.begin < sample.time <= window.end]
    return [Sample(window.begin, sample.nbytes) for sample in before] + inside


# A page with the timeline of all ranks, in one file that needs no network -------------------------

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
