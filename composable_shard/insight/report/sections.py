"""What a report is made of: tables of cells, and lists of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of short texts.

    Attributes:
        title: What it shows.
        columns: Their headings.
        rows: The cells.
        num_words: How many columns, from the left, hold words; the others hold amounts.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1


@dataclass(frozen=True)
class Sentences:
    """Some sentences under a heading."""

    title: str
    sentences: tuple[str, ...]


Section = Table | Sentences


def as_text(sections: Sequence[Section]) -> str:
    """Write sections as plain text, tables with their columns in line.

    >>> print(as_text([Table("Sizes", ("of", "bytes"), (("a", "10"), ("long", "2")))]))
    Sizes
      of    bytes
      a        10
      long      2
    """
    return "\n\n".join(_section_text(section) for section in sections)


def _section_text(section: Section) -> str:
    if isinstance(section, Sentences):
        return "\n".join([section.title, *(f"  - {line}" for line in section.sentences)])
    widths = [max(map(len, column)) for column in zip(section.columns, *section.rows, strict=True)]
    lines = [section.title]
    for row in (section.columns, *section.rows):
        cells = [
            cell.ljust(width) if place < section.num_words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
