"""``docs/timeline.md`` is a program, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.test_docs import importable
from torch import nn

from composable_shard import fully_shard, trace
from composable_shard.testing import fake_ranks

PAGE = Path(__file__).parents[2] / "docs" / "timeline.md"
MODULES = ("lanes", "merging", "palette", "picture", "spans", "summary")


def test_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    (tmp_path / "page.py").write_text(importable("\n".join(blocks)))
    (tmp_path / "run.py").write_text("import page\nif __name__ == '__main__': page.main()\n")
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [re.sub(r"[\d.]+", "#", line) for line in done.stdout.splitlines()]
    assert lines == ["rank #: #% of # ms exposed"] * 2


@pytest.mark.parametrize("name", ["trace", *(f"timeline.{name}" for name in MODULES)])
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(f"composable_shard.insight.{name}")
    names = {"torch": torch, "nn": nn, "fully_shard": fully_shard}
    more = {"trace": trace, "fake_ranks": fake_ranks}
    results = doctest.testmod(module, extraglobs={**names, **more})
    assert results.attempted > 0 and results.failed == 0
