"""The benchmark of checkpoints: what it loads is what it saved, and it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.tensor import DTensor

from composable_shard.testing import run_ranks

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LAYERS, WIDTH = 1, 64
SHARDED = ("ours", "fsdp2")
ROWS = [
    *("save sharded, 2", "load sharded, 2", "load sharded, 2 to 1"),
    *("save sharded, 1", "load sharded, 1 to 2", "save full", "load full"),
]
PATIENCE = 180.0  # seconds: files are written through to the disk, which others may use
State = dict[str, torch.Tensor]


def full_state(name: str) -> State:
    """Return all parameters and optimizer states in full. Collective: gathers each."""
    from checkpoint_acts import _BUILT

    contestant = _BUILT[name]
    state = {}
    for key, param in contestant.model.named_parameters():
        parts = {"value": param, **contestant.optimizer.state[param]}
        for part, tensor in parts.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            state[f"{key}.{part}"] = full.detach().clone()
    return state


def save(name: str, act: str, folder: Path) -> tuple[State, str]:
    """Build and train a contestant, save it; return what it was."""
    from checkpoint_acts import _BUILT, build, digest, perform
    from contestants import Spec

    build(name, Spec(layers=LAYERS, width=WIDTH, batch=1, context=8))
    _BUILT[name].step(1)
    saved = full_state(name), digest(name)
    perform(name, act, folder)
    return saved


def load(name: str, act: str, folder: Path) -> tuple[str, State, str]:
    """Build another one and load it; return what it was before, and what it is."""
    from checkpoint_acts import build, digest, perform
    from contestants import Spec

    build(name, Spec(layers=LAYERS, width=WIDTH, batch=1, context=8))
    before = digest(name)
    perform(name, act, folder)
    return before, full_state(name), digest(name)


def same(one: State, other: State) -> bool:
    return list(one) == list(other) and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("name", SHARDED)
def test_what_other_ranks_load_is_bitwise_what_was_saved(
    tmp_path: Path, name: str, kind: str, ranks: tuple[int, int]
) -> None:
    savers, loaders = ranks
    (saved, digest), *_ = run_ranks(
        save, savers, name, f"save_{kind}", tmp_path / "it", timeout=PATIENCE
    )
    assert len(saved) == 4 * len([key for key in saved if key.endswith(".value")])
    for before, loaded, found in run_ranks(
        load, loaders, name, f"load_{kind}", tmp_path / "it", timeout=PATIENCE
    ):
        assert same(loaded, saved)
        assert found == digest != before


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
