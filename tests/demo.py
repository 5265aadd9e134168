"""Training of ``examples`` as their command lines say, on ranks that are soon there.

A process that starts from nothing imports torch for seconds. Where a test is not about how the
program starts its ranks, they come from ``run_ranks``; they have run nothing before, as its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import train_lm
from composable_shard.testing import run_ranks, stop_ranks
from lm.ranks import Job, Place

ROOT = Path(__file__).parents[1]
SMALL = [
    *("--width", "32", "--context", "32", "--batch", "4", "--sample-bytes", "4"),
    *("--steps", "8", "--checkpoint-every", "3"),
]


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(4000)))
    return path


def train(*arguments: str, program: Any = train_lm) -> None:
    with mock.patch.object(program, "run_on_ranks", on_fresh_ranks):
        program.main(arguments)


def on_fresh_ranks(job: Job, num_ranks: int, device_type: str) -> None:
    assert device_type == "cpu"
    stop_ranks()
    run_ranks(at_its_place, num_ranks, job)


def at_its_place(job: Job) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        job(Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def run(script: str, *arguments: str, timeout: float = 240) -> str:
    return _run(str(ROOT / script), *arguments, timeout=timeout)


def _run(*arguments: str, timeout: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
