"""The benchmark for a GPU, as far as a CPU can run it: that it compares what it says it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = {
    **{"layers": 2, "width": 64, "ffn_width": 128, "head_width": 16, "kv_heads": 2},
    **{"batch": 2, "context": 8},
}
CONTESTANTS = [
    f"{name}{suffix}" for suffix in ("", "+checkpointing") for name in ("ours", "fsdp2", "plain")
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "cuda.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def size_flags() -> list[str]:
    pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in TINY.items()]
    return [word for pair in pairs for word in pair]


@pytest.mark.matrix
def test_every_contestant_is_measured_in_every_world(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ["--device", "cpu", "--rounds", "2", "--steps-per-round", "1", "--json", str(file)]
    done = run(*flags, "--ranks", "1", "8", *size_flags())
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["size"] == TINY
    assert figures["failures"] == {}
    assert list(figures["worlds"]) == ["1", "8"]
    for world in figures["worlds"].values():
        assert (world["allocated"], world["reserved"]) == ({}, {})
        for kind in ("step", "host"):
            assert list(world[kind]) == CONTESTANTS
            assert all(len(sample) == 2 and min(sample) > 0 for sample in world[kind].values())
    for label in ("composable_shard", "torch FSDP2", "plain module"):
        assert done.stdout.count(label) == 4
