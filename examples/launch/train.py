"""A training program that you may stop, kill and start again, on one machine or on many.

    torchrun --nproc-per-node 2 examples/launch/train.py --checkpoint-dir runs/launch

It resumes from the newest complete checkpoint in its folder, on any number of ranks. All ranks must
see the folder. The other files in this folder start the program on several machines, with torchrun,
Slurm, Kubernetes or Ray Train; ``docs/many_machines.md`` explains them.

The model is a toy; copy ``main`` and use your own. Batches depend on the step alone. So on the CPU,
the same number of ranks gives bitwise the same losses after any interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW, Optimizer

from composable_shard import fully_shard
from composable_shard.train.checkpoint import complete_checkpoints, save_checkpoint

WIDTH, NUM_LAYERS = 64, 4
NUM_KEPT = 2  # checkpoints


def build(device: torch.device) -> nn.Module:
    """Build the model and shard it over all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(device)
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(step: int, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(num_rows, WIDTH, generator=generator)
    rows = inputs.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return rows, rows.square().mean(1, keepdim=True)


def state_of(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    """Return the state of a checkpoint."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": step,
    }


def resume(model: nn.Module, optimizer: Optimizer, folder: Path) -> int:
    """Load the newest complete checkpoint, if there is any; return its number of steps."""
    newest: list[Path | None] = [None]
    if dist.get_rank() == 0:  # rank 0 chooses, because all ranks must load the same one
        newest = [*complete_checkpoints(folder)[-1:], None][:1]
    dist.broadcast_object_list(newest, src=0)
    if newest[0] is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest[0])
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return state["step"]


def save(model: nn.Module, optimizer: Optimizer, folder: Path, step: int) -> None:
    """Write a checkpoint, and remove older ones."""
    target = folder / f"step-{step:06d}"
    save_checkpoint(state_of(model, optimizer, step), target)
    if dist.get_rank() == 0:
        for old in complete_checkpoints(folder)[:-NUM_KEPT]:
            shutil.rmtree(old)


class Losses:
    """A file with one line for each step, written by rank 0."""

    def __init__(self, file: Path, steps_done: int) -> None:
        self._file = file if dist.get_rank() == 0 else None
        if self._file is not None:
            known = file.read_text().splitlines(keepends=True) if file.exists() else []
            file.write_text("".join(known[:steps_done]))  # later steps run again

    def add(self, step: int, loss: float) -> None:
        """Write the loss of a step."""
        if self._file is not None:
            with self._file.open("a") as opened:
                opened.write(json.dumps({"step": step, "loss": loss}) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on this rank."""
    options = read_options(arguments)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    is_ours = not dist.is_initialized()  # Ray Train starts the process group itself
    if is_ours:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=options.timeout),
        )
    if options.batch % dist.get_world_size():
        raise SystemExit(
            f"Expected --batch to be a multiple of the {dist.get_world_size()} ranks, "
            f"got {options.batch}"
        )
    folder: Path = options.checkpoint_dir
    folder.mkdir(parents=True, exist_ok=True)
    model = build(device)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    start = resume(model, optimizer, folder)
    place = f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}"
    print(f"{place}: from step {start}", flush=True)
    losses = Losses(folder / "losses.jsonl", start)
    for step in range(start, options.steps):
        inputs, targets = batch(step, options.batch, device)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.add(step + 1, total.item() / dist.get_world_size())
        if (step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps:
            save(model, optimizer, folder, step + 1)
        time.sleep(options.pause)
    if is_ours:
        dist.destroy_process_group()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a toy, and resume after any interruption.")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("runs/launch"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--batch", type=int, default=48, help="rows of a step, over all ranks")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds to wait for a silent rank"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
