"""The benchmark of optimizers runs from end to end, each way the same number of times."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

benchmark = importlib.import_module("optimizer")


def test_each_optimizer_is_measured_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "NUM_GROUPS", 3)
    path = tmp_path / "figures.json"
    assert benchmark.main(["--rounds", "2", "--width", "8", "--json", str(path)]) == 0
    seconds = json.loads(path.read_text())["seconds"]
    assert seconds.keys() == benchmark.MAKES.keys()
    for times in seconds.values():
        assert {way: len(each) for way, each in times.items()} == dict(stock=2, flat=2, plain=2)
        assert all(time > 0 for way in times.values() for time in way)
