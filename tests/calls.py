"""Calls that are refused, in a table: each at the margin, and indented what is raised."""

from __future__ import annotations

import re


def said_of_calls(table: str) -> dict[str, str]:
    """Return what a table says of each call, without its line breaks."""
    found = re.findall(r"^(\S.*)\n((?:    .+\n)+)", table, re.MULTILINE)
    return {call: " ".join(map(str.strip, said.splitlines())) for call, said in found}
