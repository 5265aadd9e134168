"""Under ``torchrun --max-restarts`` the example goes on after ``kill -9``, with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--layers", "2", "--width", "32", "--context", "32", "--batch", "4", "--sample-bytes", "4"),
    *("--steps", "8", "--checkpoint-every", "3"),
]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "1", "--monitor-interval", "0.2"),
]


def run(command: list[str]) -> str:
    """Run a program to its end, and end it and its ranks if it takes too long."""
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks then
            printed, _ = process.communicate(timeout=40)
            raise AssertionError(f"Expected an end, got none:\n{printed[-3000:]}") from None
    assert process.returncode == 0, printed[-5000:]
    return printed


def losses(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(4000)))
    return path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    options = [*SMALL, "--text", str(text), "--checkpoint-dir", str(folder)]
    run([sys.executable, "examples/train_lm.py", *options])
    return losses(folder)


PLACES = [("backward", 0), ("save", 1)]
if os.environ.get("PARITY_EXAMPLES"):  # each costs seven starts of torch
    PLACES.append(("step", 1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "rank"), PLACES)
def test_losses_after_a_kill_are_those_of_an_uninterrupted_run(
    tmp_path: Path,
    text: Path,
    uninterrupted: list[dict[str, float]],
    place: str,
    rank: int,
) -> None:
    folder = tmp_path / "run"
    options = [*SMALL, "--text", str(text), "--checkpoint-dir", str(folder)]
    printed = run([*TORCHRUN, "tests/faults/train_and_die.py", place, str(rank), *options])
    assert "Signal 9 (SIGKILL)" in printed or "exitcode: -9" in printed, printed
    assert [line["step"] for line in uninterrupted] == list(range(1, 9))
    assert losses(folder) == uninterrupted
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["losses.jsonl", "run.json", "step-000006", "step-000008"]
