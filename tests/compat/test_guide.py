"""The examples of the guide run, on two ranks, and its tables name what there is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from composable_shard.testing import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "from_fsdp1.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def run_all(sources: list[str]) -> int:
    names: dict[str, object] = {"__name__": "guide"}
    for number, source in enumerate(sources):
        exec(compile(source, f"block {number} of {GUIDE.name}", "exec"), names)
    return len(sources)


def test_examples_run() -> None:
    assert run_ranks(run_all, 2, blocks()) == [6, 6]


def test_imports_of_the_first_example_exist() -> None:
    added = re.findall(r"^\+from (\S+) import (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert added
    for module, names in added:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name)
