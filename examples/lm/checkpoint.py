"""The folder of a run: its settings, its losses, and its newest sharded checkpoints.

    <folder>/run.json        settings that change the losses; a resume must have the same
    <folder>/losses.jsonl    one line for each step: {"step": 1, "loss": 5.54...}
    <folder>/step-000200/    model, optimizer and progress after 200 steps, a file from each rank

A checkpoint gets its name only when it is complete. The checkpoint before the newest one is kept,
in case a file of the newest is damaged. A checkpoint holds no position in the text, because the
number of steps determines the batch: see ``text.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from composable_shard.train.checkpoint import complete_checkpoints, save_checkpoint

NUM_KEPT = 2  # checkpoints

Settings = dict[str, int | float | str]


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: number of steps done.
        loss_before: held-out loss before the first step, in nats per byte.
    """

    step: int
    loss_before: float


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, in a folder that all ranks see."""

    path: Path

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        complete = complete_checkpoints(self.path)
        return complete[-1] if complete else None

    def begin(self, settings: Settings, overwrite: bool) -> None:
        """Make the folder ready for a new run (called on one rank)."""
        for old in self.path.glob("step-*") if overwrite else ():
            shutil.rmtree(old)
        self.path.mkdir(parents=True, exist_ok=True)
        _write_whole(self._losses, "")
        _write_whole(self._run, json.dumps(settings, indent=2) + "\n")

    def refuse_overwriting(self) -> None:
        """Raise ``ValueError`` if a new run would lose an earlier one."""
        if newest := self.newest():
            raise ValueError(
                f"{self.path} holds {newest.name} of an earlier run: pass --resume to continue it, "
                "--overwrite to begin again, or another --checkpoint-dir"
            )

    def refuse_other_run(self, settings: Settings) -> None:
        """Raise ``ValueError`` unless the folder holds a checkpoint made with these settings."""
        if self.newest() is None:
            raise ValueError(f"{self.path} holds no checkpoint: omit --resume")
        saved = json.loads(self._run.read_text())
        different = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in settings.items()
            if saved.get(name) != value
        ]
        if different:
            raise ValueError(
                f"Cannot resume {self.path} with other settings: {'; '.join(different)}"
            )

    def save(self, model: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint, and remove all but the newest two (called on every rank)."""
        target = self.path / f"step-{progress.step:06d}"
        state: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "progress": asdict(progress),
        }
        if dist.get_rank() == 0 and target.exists():  # damaged, so the run resumed an earlier one
            shutil.rmtree(target)
        save_checkpoint(state, target)
        if dist.get_rank() == 0:
            kept = complete_checkpoints(self.path)[-NUM_KEPT:]
            for old in self.path.glob("step-*"):
                if old not in kept:
                    shutil.rmtree(old)

    def load(self, model: nn.Module, optimizer: Optimizer) -> Progress:
        """Load the newest checkpoint, and drop later losses (called on every rank).

        It may have been written by another number of ranks.
        """
        state: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "progress": asdict(Progress(step=0, loss_before=0.0)),
        }
        dcp.load(state, checkpoint_id=self.newest())
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        progress = Progress(**state["progress"])
        if dist.get_rank() == 0:
            done = self._losses.read_text().splitlines(keepends=True)[: progress.step]
            _write_whole(self._losses, "".join(done))
        return progress

    def record(self, step: int, loss: float) -> None:
        """Add the loss of a step to the history (called on one rank)."""
        with self._losses.open("a") as losses:
            losses.write(json.dumps({"step": step, "loss": loss}) + "\n")

    @property
    def _losses(self) -> Path:
        return self.path / "losses.jsonl"

    @property
    def _run(self) -> Path:
        return self.path / "run.json"


def _write_whole(file: Path, text: str) -> None:
    """Write a file atomically."""
    part = file.with_suffix(".part")
    part.write_text(text)
    os.replace(part, file)
