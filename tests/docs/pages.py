"""The pages of the documentation, as their source says: blocks of code, headings, links.

What a page's source says about its blocks, in comments that no reader sees:

``<!-- ranks: 1 3 -->``       once in a page: on how many ranks it runs, instead of on two
``<!-- starts its own ranks -->``  once in a page: it runs as one process
``<!-- no ranks -->``         once in a page: it runs in one process without a process group
``<!-- raises -->``           the next block raises what the text after it says
``<!-- prints -->``           the next block prints, on rank 0, the text after it
``<!-- not run: why -->``     the next block is no program

A block that stands within a comment is run like the others and not shown.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# The fence may be indented, in a list; what is written before it may be one comment.
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<fence>```+|~~~+)[ ]*(?P<language>[^\s`{]*)(?P<more>[^\n`]*)\n"
    r"(?P<source>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
DIRECTIVE = re.compile(r"<!-- (raises|prints|not run: (?P<reason>[^\n]+?)) -->\s*\Z")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
OBJECT = re.compile(r"^::: +([\w.]+)$", re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")

# What other languages have too (names, values, `name: value`, `NAME=value`) is not here.
PYTHON = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.With, ast.For, ast.Call)

Way = Literal["run", "raises", "prints", "not run"]


@dataclass(frozen=True)
class Block:
    """A block of code, and how the test runs it; if it does not run, ``reason`` says why.

    ``expected`` is the text block behind it, if it raises or prints.
    """

    language: str
    source: str
    line: int
    way: Way = "run"
    reason: str = ""
    expected: str = ""

    @property
    def looks_like_python(self) -> bool:
        """Whether it is a program of Python, whatever it is said to be."""
        try:
            tree = ast.parse(self.source)
        except SyntaxError:
            return False
        return any(isinstance(node, PYTHON) for node in ast.walk(tree))


@dataclass(frozen=True)
class Page:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[Block]:
        found = list(FENCE.finditer(self.text))
        return [self._block(one, after) for one, after in pairwise([*found, None]) if one]

    def _block(self, fence: re.Match[str], after: re.Match[str] | None) -> Block:
        directive = DIRECTIVE.search(self.text[: fence.start()])
        way: Way = "run"
        reason = expected = ""
        if directive is not None:
            reason = directive["reason"] or ""
            way = "not run" if reason else "raises" if directive[1] == "raises" else "prints"
        if way in ("raises", "prints"):
            assert after is not None and after["language"] == "text", f"{self}: no text follows"
            expected = textwrap.dedent(after["source"])
        line = self.text.count("\n", 0, fence.start("source")) + 1
        source = textwrap.dedent(fence["source"])
        return Block(fence["language"], source, line, way, reason, expected)

    @property
    def programs(self) -> list[Block]:
        return [b for b in self.blocks if b.language == "python" and b.way != "not run"]

    @property
    def has_no_ranks(self) -> bool:
        """Whether it is run where there is no process group."""
        return re.search(r"^<!-- no ranks -->$", self.text, re.MULTILINE) is not None

    @property
    def num_ranks(self) -> list[int]:
        """On how many ranks it is run, each in turn; empty for one that needs none."""
        if self.has_no_ranks or re.search(
            r"^<!-- starts its own ranks -->$", self.text, re.MULTILINE
        ):
            return []
        said = re.search(r"^<!-- ranks: ([\d ]+) -->$", self.text, re.MULTILINE)
        return [int(number) for number in said[1].split()] if said else [2]

    @cached_property
    def prose(self) -> str:
        """The source without its blocks of code and comments; as many lines."""
        text = FENCE.sub(_blank, self.text)
        return re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)

    @property
    def headings(self) -> list[str]:
        return HEADING.findall(self.prose)

    @property
    def objects(self) -> list[str]:
        """The names that the reference shows here."""
        return OBJECT.findall(self.prose)

    @property
    def links(self) -> list[str]:
        without_code = re.sub(r"`[^`\n]*`", "``", self.prose)
        return LINK.findall(without_code)

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def all_pages() -> Iterator[Page]:
    """Yield the pages of the site, then the others that are written for people."""
    yield from site_pages()
    for path in ("README.md", "CONTRIBUTING.md", "examples/README.md"):
        yield Page(ROOT / path)


def site_pages() -> list[Page]:
    return [Page(path) for path in sorted(DOCS.rglob("*.md"))]


def resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")
