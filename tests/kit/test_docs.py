"""``docs/testing.md`` is a program, and the examples of the kit run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import composable_shard.testing as kit
from composable_shard.testing import strategies

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
MODULES = (
    "expressions",
    "programs",
    "training",
    "trees",
    "strategies.models",
    "strategies.programs",
    "strategies.shapes",
)


def importable(text: str) -> str:
    """Put what is not a definition or import into `main`, as ranks import the module."""
    definitions, rest = [], []
    for node in ast.parse(text).body:
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        (definitions if isinstance(node, kinds) else rest).append(ast.unparse(node))
    body = "\n".join(rest).replace("\n", "\n    ")
    return "from __future__ import annotations\n" + "\n".join(
        [*definitions, f"def main():\n    {body}\n"]
    )


def test_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    (tmp_path / "page.py").write_text(importable("\n".join(blocks)))
    (tmp_path / "run.py").write_text("import page\nif __name__ == '__main__': page.main()\n")
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(f"composable_shard.testing.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


def test_everything_public_has_an_example() -> None:
    public = [getattr(kit, name) for name in kit.__all__ if name not in ("STEPS", "Step")]
    public += [getattr(strategies, n) for n in strategies.__all__ if n != "AccumulationStep"]
    without = [one.__name__ for one in public if ">>>" not in (one.__doc__ or "")]
    assert without == ["RankError", "RankFailure", "RankTimeout"]  # nobody makes them
