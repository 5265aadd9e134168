"""The program of the README does what the README says of it, and ends cleanly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from warm import Warm

from docs.pages import ROOT, Page

NUM_RANKS = 2
PROGRAM = Page(ROOT / "README.md").programs[0].source
END = "dist.destroy_process_group()"

# What runs last says which process groups are left.
LAST = """
import torch.distributed as dist
last.append(lambda: print("left:", dist.is_initialized(), flush=True))
"""


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


@pytest.mark.brief(1)
@pytest.mark.parametrize("end", [END, ""], ids=["destroys", "leaves"])
def test_the_program_prints_its_losses_and_leaves_no_process_group(
    end: str, warm: Warm, tmp_path: Path
) -> None:
    assert PROGRAM.count(END) == 1
    first, second = warm.run(tmp_path, LAST + PROGRAM.replace(END, end), NUM_RANKS)
    assert first == (0, "\n".join([*expected_lines(), "left: False\n"]), "")
    assert second == (0, "left: False\n", "")


def test_it_uses_no_device_by_name() -> None:
    assert "device=device" in PROGRAM
    assert "cuda" not in PROGRAM and "cpu" not in PROGRAM
