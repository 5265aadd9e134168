"""Lines of a report: in colours on a terminal where rich is installed, else plain text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 100


@dataclass(frozen=True)
class Line:
    """A topic and what there is to say about it, in a colour of a terminal if one is given."""

    topic: str
    text: str
    colour: str = ""


def print_lines(lines: Sequence[Line]) -> None:
    """Print the lines, aligned; in colours on a terminal."""
    if not (sys.stdout.isatty() and _print_in_colours(lines)):
        print(plain(lines))


def _print_in_colours(lines: Sequence[Line]) -> bool:
    """Print a table by rich; tell whether it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table.grid(padding=(0, 2))
    for line in lines:
        table.add_row(Text(line.topic, style=f"bold {line.colour}".strip()), Text(line.text))
    Console().print(table)
    return True


def plain(lines: Sequence[Line]) -> str:
    """Return the lines as text without colours."""
    width = max((len(line.topic) for line in lines), default=0) + 2
    return "\n".join(
        textwrap.fill(f"{line.topic:{width}}{line.text}", WIDTH, subsequent_indent=" " * width)
        for line in lines
    )
