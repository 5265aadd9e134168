"""How results are shown: as text, by rich, in a notebook, as a dict."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Numbers as people read them ----------------------------------------------------------------------

UNKNOWN = "?"
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


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


def _in_units(amount: float, step: int, units: Sequence[str]) -> str:
    power = 0
    while amount >= step and power < len(units) - 1:
        amount, power = amount / step, power + 1
    return f"{_three_digits(amount)}{units[power]}"


def seconds_text(seconds: float | None) -> str:
    """Write a time with three digits: ``1.5 ms``.

    >>> seconds_text(0.0015), seconds_text(70.0), seconds_text(0.0), seconds_text(None)
    ('1.5 ms', '70 s', '0 s', '?')
    """
    if seconds is None:
        return UNKNOWN
    for scale, unit in _SECONDS:
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{_three_digits(seconds / 1e-9)} ns"


def names_text(names: tuple[str, ...], most: int = 3) -> str:
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


def _three_digits(amount: float) -> str:
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


# What a report is made of: tables of cells, and lists of sentences --------------------------------


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


# A result that shows itself wherever it is asked to -----------------------------------------------


class Report:
    """A result in sections: ``str()`` needs nothing else, rich and notebooks find their own.

    Subclasses are dataclasses of plain values.
    """

    def sections(self) -> list[Section]:
        """Return what there is to show, in order."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, as JSON has them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[call-overload]
        return plain

    def __str__(self) -> str:
        return as_text(self.sections())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Called by rich, which is there then."""
        from rich.table import Table as RichTable
        from rich.text import Text

        for section in self.sections():
            if isinstance(section, Sentences):
                yield Text(section.title, style="bold")
                yield from (Text(f"  - {line}") for line in section.sentences)
                yield Text("")
                continue
            table = RichTable(title=Text(section.title, style="bold"), title_justify="left")
            for place, name in enumerate(section.columns):
                table.add_column(
                    Text(name),
                    justify="left" if place < section.num_words else "right",
                    overflow="fold",
                )
            for row in section.rows:
                table.add_row(*map(Text, row))
            yield table

    def _repr_html_(self) -> str:
        return "\n".join(map(_section_html, self.sections()))


def _section_html(section: Section) -> str:
    title = f"<p><b>{html.escape(section.title)}</b></p>"
    if isinstance(section, Sentences):
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in section.sentences)
        return f"{title}<ul>{lines}</ul>"
    aligned = ["left" if i < section.num_words else "right" for i in range(len(section.columns))]
    head = _row_html("th", section.columns, aligned)
    body = "".join(_row_html("td", row, aligned) for row in section.rows)
    return f"{title}<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _row_html(tag: str, cells: Sequence[str], aligned: Sequence[str]) -> str:
    inner = "".join(
        f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
        for cell, side in zip(cells, aligned, strict=True)
    )
    return f"<tr>{inner}</tr>"
