"""``docs/loading.md`` is a program: it runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from composable_shard.testing import run_ranks

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


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_page_runs(tmp_path: Path, num_ranks: int) -> None:
    assert run_ranks(execute, num_ranks, tmp_path) == [5] * num_ranks
