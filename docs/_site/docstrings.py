"""How docstrings become pages: their own sections, and their references, in Markdown.

Docstrings of the package are in the style of Google, with sections that tools do not know
(``Collective: none.``) and roles of reStructuredText (``:func:`fully_shard```).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

OWN_SECTIONS = re.compile(r"^(Collective|Memory|Source): ", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|attr):`~?([\w.]+)`")
PUBLIC = set(
    re.findall(
        r'^    "(\w+)",$',
        (Path(__file__).parents[2] / "composable_shard" / "__init__.py").read_text(),
        re.MULTILINE,
    )
)
LITERAL = re.compile(r"^\.\. code-block:: python$", re.MULTILINE)


def in_markdown(text: str) -> str:
    """Return a docstring as the site's tools read it."""
    text = EXAMPLE.sub("Examples:", text)
    text = OWN_SECTIONS.sub(r"\n**\1:** ", text)
    text = LITERAL.sub("", text)
    return ROLE.sub(_reference, text)


def _reference(role: re.Match[str]) -> str:
    """Return a link to what is public, and the name of anything else."""
    name = role[1].removeprefix("composable_shard.")
    return f"[`{name}`][composable_shard.{name}]" if name in PUBLIC else f"`{name}`"


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package when it has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite that of one object."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
