"""How docstrings become pages: their own sections, and their references, in Markdown.

Docstrings of the package are in the style of Google, with sections that tools do not know
(``Collective: none.``) and roles of reStructuredText (``:func:`fully_shard```).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

OWN_SECTIONS = re.compile(r"^(Collective|Memory|Source): ", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth):`~?([\w.]+)`")
LITERAL = re.compile(r"^\.\. code-block:: python$", re.MULTILINE)


def in_markdown(text: str) -> str:
    """Return a docstring as the site's tools read it."""
    text = EXAMPLE.sub("Examples:", text)
    text = OWN_SECTIONS.sub(r"\n**\1:** ", text)
    text = LITERAL.sub("", text)
    return ROLE.sub(r"`\1`", text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package when it has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite that of one object."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
