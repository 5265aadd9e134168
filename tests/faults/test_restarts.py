"""Under ``torchrun --max-restarts`` the example goes on after ``kill -9``, with the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import demo
import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "3", "--monitor-interval", "0.2"),
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


def options(folder: Path, text: Path) -> list[str]:
    chosen = ["--layers", "2", "--text", str(text), "--checkpoint-dir", str(folder)]
    return [*demo.SMALL, *chosen]


# Where a rank dies in the first attempt, in the second, ...: each costs two more starts of torch.
@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "deaths", ["save:1", pytest.param("backward:0,save:1,step:1", marks=pytest.mark.matrix)]
)
def test_losses_after_kills_are_those_of_an_uninterrupted_run(deaths: str, tmp_path: Path) -> None:
    text = demo.write_text(tmp_path)
    uninterrupted, folder = tmp_path / "uninterrupted", tmp_path / "run"
    demo.train(*options(uninterrupted, text))
    program = ["tests/faults/train_and_die.py", deaths, *options(folder, text)]
    printed = run([*TORCHRUN, *program])
    assert printed.count("exitcode: -9") == len(deaths.split(",")), printed
    assert [line["step"] for line in demo.lines(uninterrupted)] == list(range(1, 9))
    assert demo.lines(folder) == demo.lines(uninterrupted)
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["losses.jsonl", "run.json", "step-000006", "step-000008"]
