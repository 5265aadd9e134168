"""The programs beside the package: the example that resumes, the benchmark that checks itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--batch", "4", "--sample-bytes", "4"]


def run(script: str, *arguments: str, timeout: float = 240) -> str:
    """Run a program of the repository to its end and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in ("step", "loss")} for line in lines]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(4000)))
    return path


def train(folder: Path, text: Path, *more: str) -> None:
    run(
        "examples/train_lm.py",
        *SMALL,
        *("--steps", "8", "--checkpoint-every", "3", "--text", str(text)),
        *("--checkpoint-dir", str(folder), *more),
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The folder of a run from start to end."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    train(folder, text, "--trace", str(folder / "timeline"))
    return folder


def test_a_resumed_training_has_bitwise_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, text: Path, uninterrupted: Path
) -> None:
    parts = tmp_path / "parts"
    train(parts, text, "--stop-at", "5")
    assert len(losses(parts)) == 5
    train(parts, text, "--resume")
    assert len(losses(uninterrupted)) == 8
    assert losses(parts) == losses(uninterrupted)


def test_the_example_records_a_timeline(uninterrupted: Path) -> None:
    found = json.loads((uninterrupted / "timeline" / "trace.json").read_text())
    summary = found["otherData"]["summary"]
    assert (summary["first_step"], summary["num_steps"]) == (4, 3)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]


def test_gradients_as_int8_hardly_change_the_losses_and_resume(
    tmp_path: Path, text: Path, uninterrupted: Path
) -> None:
    train(tmp_path / "int8", text, "--int8-gradients", "--stop-at", "5")
    train(tmp_path / "int8", text, "--int8-gradients", "--resume")
    exact, rounded = losses(uninterrupted), losses(tmp_path / "int8")
    assert exact != rounded
    for one, other in zip(exact, rounded, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)


def test_the_example_of_a_subclass_passes_the_kit_and_learns() -> None:
    lines = run("examples/custom_subclass.py").splitlines()
    assert lines[0] == "Int8Rows: all 13 checks pass"
    losses = [re.fullmatch(r"rank (\d): loss (\S+) at first, (\S+) at last", x) for x in lines[-2:]]
    for rank, match in enumerate(losses):
        assert match is not None and int(match[1]) == rank
        assert float(match[2]) > 1 and float(match[3]) < 0.1


def test_the_contestants_of_the_benchmark_train_alike() -> None:
    printed = run("benchmarks/step.py", "--check", "2", "--layers", "1", "--width", "64")
    assert "failed" not in printed
