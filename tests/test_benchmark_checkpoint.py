"""The benchmark of checkpoints: it measures all that it names, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LAYERS, WIDTH = 1, 64
SHARDED = ("ours", "fsdp2")
ROWS = [
    *("save sharded, 2", "load sharded, 2", "load sharded, 2 to 1"),
    *("save sharded, 1", "load sharded, 1 to 2", "save full", "load full"),
]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, by its path: the tests of checkpoints are a package of the same name."""
    spec = importlib.util.spec_from_file_location("program", BENCHMARKS / "checkpoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "program", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.matrix
def test_the_program_measures_all_and_cleans_up(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, place = tmp_path / "figures.json", tmp_path / "checkpoints"
    place.mkdir()
    sizes = ["--rounds", "2", "--layers", str(LAYERS), "--width", str(WIDTH)]
    assert program.main([*sizes, "--folder", str(place), "--json", str(file)]) == 0
    assert list(place.iterdir()) == []
    figures = json.loads(file.read_text())
    assert sorted(figures["costs"]) == sorted(ROWS)
    for label, costs in figures["costs"].items():
        plain = ["single"] if label in ("save full", "load full") else []
        assert sorted(costs) == sorted([*SHARDED, *plain])
        for sample in costs.values():
            assert len(sample) == 2
            assert all(len(cost) == 3 and min(cost[:2]) > 0 <= cost[2] for cost in sample)
    assert {kind: sorted(sizes) for kind, sizes in figures["on_disk"].items()} == {
        "full": ["fsdp2", "ours", "single"],
        "other": ["fsdp2", "ours"],
        "sharded": ["fsdp2", "ours"],
    }
    lines = capsys.readouterr().out.splitlines()
    printed = [line for line in lines if line.startswith("bytes on disk")]
    assert len(printed) == 3 and all(str(figures["payload"]) in line for line in printed)
