"""The forms of results: text, rich, notebooks, dicts."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Numbers in texts ---------------------------------------------------------------------------------

UNKNOWN = "?"


def nbytes_text(nbytes: float | None) -> str:
    """Write a number of bytes with three digits: ``1.5 MiB``, ``0 B``; ``?`` if it is not known.

    >>> nbytes_text(1536), nbytes_text(5 * 2**30), nbytes_text(12), nbytes_text(None)
    ('1.5 KiB', '5 GiB', '12 B', '?')
    """
    if nbytes is None:
        return UNKNOWN
    return _in_units(nbytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def count_text(count: float) -> str:
    """Write a count with three digits: ``1.23 M``.

    >>> count_text(999), count_text(1234567), count_text(7e10)
    ('999', '1.23 M', '70 G')
    """
    return _in_units(count, 1000, ("", " k", " M", " G", " T", " P", " E"))


def seconds_text(seconds: float) -> str:
    """Write a time with three digits: ``1.5 ms``.

    >>> seconds_text(0.0015), seconds_text(70.0), seconds_text(0.0)
    ('1.5 ms', '70 s', '0 s')
    """
    return _in_units(seconds * 1e9, 1000, (" ns", " us", " ms", " s")) if seconds else "0 s"


def _in_units(amount: float, step: int, units: Sequence[str]) -> str:
    power = 0
    while amount >= step and power < len(units) - 1:
        amount, power = amount / step, power + 1
    digits = f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"
    return digits + units[power]


def names_text(names: Sequence[str], most: int = 3) -> str:
    """List names, the first ones of many.

    >>> names_text(("a", "b")), names_text(("a", "b", "c", "d"))
    ('a, b', 'a, b, c and 1 more')
    """
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def counted(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# The sections of a report: tables, and lists of sentences -----------------------------------------


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Its title.
        headings: The headings of its columns.
        rows: The cells of each row.
        num_words: The number of columns, from the left, that hold words; the others hold amounts.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    num_words: int = 1

    @property
    def lines(self) -> list[list[str]]:
        """The headings, then the texts of each row."""
        return [list(map(str, line)) for line in (self.headings, *self.rows)]

    @property
    def sides(self) -> list[Literal["left", "right"]]:
        """The side of each column at which its texts are aligned."""
        return ["left" if i < self.num_words else "right" for i in range(len(self.headings))]


@dataclass(frozen=True)
class Sentences:
    """Some sentences under a heading."""

    title: str
    sentences: Sequence[str]


Section = Table | Sentences


def as_text(sections: Sequence[Section]) -> str:
    """Write sections as plain text, tables with their columns in line.

    >>> print(as_text([Table("Sizes", ("of", "bytes"), (("a", 10), ("long", 2)))]))
    Sizes
      of    bytes
      a        10
      long      2
    """
    return "\n\n".join(map(_section_text, sections))


def _section_text(section: Section) -> str:
    if isinstance(section, Sentences):
        return "\n".join([section.title, *(f"  - {line}" for line in section.sentences)])
    lines, aligns = [section.title], {"left": "<", "right": ">"}
    widths = [max(map(len, column)) for column in zip(*section.lines, strict=True)]
    formats = [f"{aligns[side]}{width}" for side, width in zip(section.sides, widths, strict=True)]
    lines += [f"  {'  '.join(map(format, cells, formats))}".rstrip() for cells in section.lines]
    return "\n".join(lines)


class Report:
    """A result in sections. ``str()`` works everywhere; rich and notebooks show their own form.

    Subclasses are dataclasses of plain values.
    """

    def sections(self) -> list[Section]:
        """Return the sections, in order."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, as JSON has them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[call-overload]
        return plain

    def __str__(self) -> str:
        return as_text(self.sections())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Draw the sections; rich calls it, so rich is installed."""
        from rich.table import Table as RichTable
        from rich.text import Text

        for section in self.sections():
            if isinstance(section, Sentences):
                yield Text(f"{_section_text(section)}\n")
                continue
            table = RichTable(title=Text(section.title, style="bold"), title_justify="left")
            headings, *rows = section.lines
            for heading, side in zip(headings, section.sides, strict=True):
                table.add_column(Text(heading), justify=side, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            yield table

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
