"""Every block of Python on every page runs, or says why not."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from composable_shard.testing import run_ranks
from docs.pages import ROOT, Page, all_pages
from docs.running import run_page, run_program

PAGES = list(all_pages())
WITH_CODE = [page for page in PAGES if page.programs]


@pytest.mark.matrix
@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_the_page_runs(page: Page, tmp_path: Path) -> None:
    if page.has_no_ranks:
        assert run_page(page.path, tmp_path) == len(page.programs)
    elif not page.num_ranks:
        assert run_program(page, tmp_path) == len(page.programs)
    for num_ranks in page.num_ranks:
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        done = run_ranks(run_page, num_ranks, page.path, folder)
        assert done == [len(page.programs)] * num_ranks


def test_no_block_of_python_escapes() -> None:
    """What looks like a fence is one; what looks like Python is marked as that, and runs."""
    for page in PAGES:
        assert len(re.findall(r"^\s*(?:```|~~~)", page.text, re.MULTILINE)) == 2 * len(
            page.blocks
        ), page
        for block in page.blocks:
            if block.language != "python":
                assert not block.looks_like_python, f"{page}:{block.line}"
                assert block.way == "run", f"{page}:{block.line}"
        comments = re.findall(r"^<!-- (?:raises|prints|not run)", page.text, re.MULTILINE)
        assert len(comments) == sum(block.way != "run" for block in page.blocks), page


def test_what_a_diff_adds_can_be_imported() -> None:
    for page in PAGES:
        for block in page.blocks:
            if block.language != "diff":
                continue
            for module, names in re.findall(
                r"^\+from (\S+) import (.*)$", block.source, re.MULTILINE
            ):
                for name in names.split(", "):
                    assert hasattr(importlib.import_module(module), name.split(" as ")[0])


def test_commands_name_files_and_targets_that_exist() -> None:
    for page in PAGES:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for block in page.blocks:
            if block.language not in ("shell", ""):
                continue
            for target in re.findall(r"^make ([a-z-]+)", block.source, re.MULTILINE):
                assert target in targets, f"{page}:{block.line}"
            for path in re.findall(r"\b((?:examples|benchmarks)/\S+\.py)\b", block.source):
                assert (ROOT / path).exists(), f"{page}:{block.line}"
