"""``docs/loading.md`` is a program: it runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

from composable_shard.testing import run_ranks, run_threads

PAGE = Path(__file__).parents[2] / "docs" / "loading.md"


def execute(folder: Path) -> int:
    text = PAGE.read_text()
    scope: dict[str, object] = {"folder": folder}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    for block in blocks:
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block.group(1), str(PAGE), "exec"), scope)
    dist.barrier()
    return len(blocks)


def test_the_page_runs(tmp_path: Path) -> None:
    assert run_ranks(execute, 2, tmp_path) == [5, 5]


def test_the_page_runs_on_one_rank(tmp_path: Path) -> None:
    assert run_threads(execute, 1, tmp_path) == [5]
