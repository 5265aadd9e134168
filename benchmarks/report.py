"""What a benchmark prints and writes."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PIPE_WIDTH = 120
MEGABYTE = 1e6


def load_average() -> float:
    """Return how many processes have wanted a core in the last minute, nan if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan


def print_load(before: float) -> None:
    """Say how quiet the machine was; figures from a busy one are worth less."""
    print(f"load average {before:.2f} before, {load_average():.2f} after; {os.cpu_count()} cores")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column to the left and the others to the right."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, columns, rows))
        return
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A pipe has no width of its own, and cut figures are no use.
    console = Console()
    (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay a table out with spaces.

    >>> print(plain_table("t", ["name", "ms"], [["a", "10"]]))
    t
    name  ms
    a     10
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [title]
    for row in [columns, *rows]:
        first, *rest = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_json(path: str, figures: dict[str, Any]) -> None:
    """Write the figures, and the machine on which they were measured."""
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
    Path(path).write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")
