"""The commands on the pages on the command line and on the drop-in exist.

Their programs run with those of all pages, in `tests/docs`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from composable_shard.cli import parse

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("command_line.md", "drop_in.md")


def blocks(page: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    return [shlex.split(line) for block in blocks(page, "sh") for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str) -> None:
    found = commands(page)
    assert len(found) >= 4
    for program, *words in found:
        if program == "composable-shard":
            parse(words)
        else:
            assert program == "torchrun"
            chosen = get_args_parser().parse_args(words)
            assert (chosen.module, chosen.training_script) == (True, "composable_shard.run")


def test_the_report_on_the_page_has_the_topics_that_are_printed() -> None:
    report, _ = blocks("command_line.md", "text")
    topics = [line.split()[0] for line in report.splitlines() if not line.startswith(" ")]
    assert topics == [
        *("torch", "python", "devices", "backends", "variables", "ranks", "transport"),
        *("all-gather", "reduce-scatter", "verdict"),
    ]
