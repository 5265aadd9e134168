"""The programs of ``examples/launch``, loaded from their files: they are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples" / "launch"


def program(name: str) -> ModuleType:
    """Load one of them."""
    spec = importlib.util.spec_from_file_location(f"launched_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(arguments: list[str]) -> None:
    """Train on a rank that is there already."""
    program("train").main(arguments)
