"""The program of the README does what the README says of it, under torchrun, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from docs.pages import ROOT, Page

NUM_RANKS = 2


def expected_lines() -> list[str]:
    """Train unsharded: the losses of rank 0, with gradients that are means over the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generators = [torch.Generator().manual_seed(1 + rank) for rank in range(NUM_RANKS)]
    lines = []
    for step in range(10):
        batches = [torch.randn(8, 64, generator=generator) for generator in generators]
        losses = [(model(x) - x).square().mean() for x in batches]
        (sum(losses) / NUM_RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"step {step}: loss {losses[0].item():.4f}")
    return lines


def test_the_program_prints_its_losses_and_ends_its_process_group(tmp_path: Path) -> None:
    program = Page(ROOT / "README.md").programs[0].source
    script = tmp_path / "train.py"
    script.write_text(f"{program}\nassert not dist.is_initialized()\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(NUM_RANKS), str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == expected_lines()
    assert "Traceback" not in done.stderr and "destroy_process_group" not in done.stderr


def test_it_uses_no_device_by_name() -> None:
    program = Page(ROOT / "README.md").programs[0].source
    assert "device=device" in program
    assert "cuda" not in program and "cpu" not in program
