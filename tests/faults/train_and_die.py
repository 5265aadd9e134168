"""Run ``examples/train_lm.py`` under torchrun, and kill a rank of the first attempts on the way.

Arguments: where in the run and which rank, for each attempt that is to fail ("save:1,step:0"); and
those of the example.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from torch.distributed.checkpoint import FileSystemWriter

import train_lm

STEP = 4  # steps are counted from 0; there is a checkpoint after each three


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_update(training: train_lm.Training, step: int) -> float:
    if step == STEP:
        kill_this_rank()
    return update(training, step)


def dying_backward(training: train_lm.Training, inputs: Any, targets: Any) -> Any:
    """Compute the loss; its backward kills the rank when it has reduced some of the groups."""
    value = loss(training, inputs, targets)
    if training.optimizer.state and value.requires_grad and num_saved(training) == 1:
        training.model.blocks[0].register_full_backward_hook(lambda *_: kill_this_rank())
    return value


def num_saved(training: train_lm.Training) -> int:
    return len(list(training.options.checkpoint_dir.glob("step-*")))


def dying_write(writer: FileSystemWriter, *args: Any) -> Any:
    """Write this rank's part of the second checkpoint, cut it, and die."""
    written = write(writer, *args)
    folder = Path(writer.path)
    if "step-000006" in folder.name:
        for part in folder.glob("*.distcp"):
            os.truncate(part, part.stat().st_size // 2)
        kill_this_rank()
    return written


update, loss, write = train_lm.Training.update, train_lm.Training.loss, FileSystemWriter.write_data
PLACES: dict[str, tuple[Any, str, Any]] = {
    "step": (train_lm.Training, "update", dying_update),
    "backward": (train_lm.Training, "loss", dying_backward),
    "save": (FileSystemWriter, "write_data", dying_write),
}

if __name__ == "__main__":
    deaths, *arguments = sys.argv[1:]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    place, rank = [*(one.split(":") for one in deaths.split(",")), ("", "")][attempt]
    if os.environ["RANK"] == rank:
        with mock.patch.object(*PLACES[place]):
            train_lm.main(arguments)
    else:
        train_lm.main(arguments)
