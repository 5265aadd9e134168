"""A result that shows itself wherever it is asked to."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composable_shard.insight.report.sections import Section, Sentences, as_text


class Report:
    """A result in sections: ``str()`` needs nothing else, rich and notebooks find their own.

    Subclasses are dataclasses of plain values.
    """

    def sections(self) -> list[Section]:
        """Return what there is to show, in order."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, as JSON has them."""
        plain: dict[str, Any] = as_plain(self)
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
                    Text(name), justify="left" if place < section.num_words else "right"
                )
            for row in section.rows:
                table.add_row(*map(Text, row))
            yield table

    def _repr_html_(self) -> str:
        return "\n".join(map(_section_html, self.sections()))


def as_plain(value: Any) -> Any:
    """Return dataclasses as dicts and tuples as lists, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: as_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: as_plain(member) for key, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_plain(member) for member in value]
    return value


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
