"""The colors and words of the picture and of the page."""

from __future__ import annotations

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
