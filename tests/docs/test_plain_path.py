"""What ``docs/design.md`` says of the code: its plain path in that order, and where things are."""

from __future__ import annotations

import importlib
import operator
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import composable_shard
from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import fake_ranks

from .pages import DOCS

PACKAGE = Path(composable_shard.__file__).parent
CORE = PACKAGE / "core"
DESIGN = (DOCS / "design.md").read_text()
PLACE = re.compile(r"`([\w/]+\.py)`|`(_?[A-Z]\w+\.\w+|[a-z_]+)`")


def places() -> list[list[tuple[str, str]]]:
    """Return for each row of the page the functions that it names, as ``(file, name)``."""
    table = DESIGN.split("## The plain path")[1].split("\n## ")[0]
    rows = []
    for line in table.splitlines():
        cells = line.split(" | ")
        if len(cells) != 2 or "core/" in cells[1]:
            continue
        file, found = "", []
        for named, function in PLACE.findall(cells[1]):
            if named:
                file = named
            else:
                found.append((file, function))
        rows.append(found)
    return rows


def test_what_a_change_touches_is_there() -> None:
    section = DESIGN.split("## Where a change goes")[1].split("\n## ")[0]
    file, found = "", []
    for named, function in re.findall(r"`([\w/]+\.py)`|`(\w+(?:\.\w+)?)`", section):
        file = named or file
        if function:
            module = importlib.import_module(f"composable_shard.{file[:-3].replace('/', '.')}")
            found.append(operator.attrgetter(function)(module))
    assert len(found) > 18


def test_a_change_touches_at_most_three_files() -> None:
    section = DESIGN.split("## Where a change goes")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| a")]
    assert len(rows) > 10
    for row in rows:
        assert len(set(re.findall(r"`([\w/]+\.py)`", row))) <= 3, row


def test_the_listing_names_every_file_and_nothing_else() -> None:
    listing = DESIGN.split("## Where things live")[1].split("```")[1].splitlines()[2:]
    folders, files = list[str](), list[str]()
    for line in listing:
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth - 1 :] = []
        files += [f"{''.join(folders)}{name}"] if name.endswith(".py") else []
        folders += [name] if name.endswith("/") else []
    paths = (str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
    there = [path for path in paths if "__init__" not in path and not path.startswith("insight/")]
    assert sorted(files) == sorted(there)


def entered() -> list[tuple[str, str]]:
    """Return which functions of the core a steady step enters, in the order of first entries."""
    seen: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(CORE)):
            seen[str(Path(code.co_filename).relative_to(CORE)), code.co_qualname] = None

    with fake_ranks(2):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        for layer in model[1:]:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        for step in range(3):
            if step == 2:
                sys.setprofile(note)
            model(torch.ones(2, 16)).float().sum().backward()
            sys.setprofile(None)
            model.zero_grad()
    return list(seen)


def test_the_plain_path_goes_through_all_functions_that_the_page_names_in_its_order() -> None:
    named, order = places(), entered()
    assert sum(map(len, named)) > 30
    missing = [place for row in named for place in row if place not in order]
    assert missing == []
    firsts = [min(map(order.index, row)) for row in named]
    assert firsts == sorted(firsts)
