"""The work that a GPU would get in a step, counted on a simulated device; no times.

Run `python benchmarks/overlap.py`. One process is rank 0 of 8, and its collectives do nothing. The
CPU counts as a device with streams, so both libraries launch their work as on a GPU
(`tests/support/simulated_device.py`). The table is for the third step, without the optimizer:

- *launches*: kernels and copies in addition to those of the plain module;
- *collectives*: gathers and reductions;
- *host waits*: how often the host waits for the device;
- *memory*: the peak bytes of all tensors minus the bytes between steps, in units of the parameters
  of one block in the dtype of compute;
- *windows*: the amount of compute that may overlap with a collective (the median), in blocks: in
  forwards of a block for a gather in forward, in backwards of a block for all other collectives. A
  collective that takes less time than its window is hidden.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import print_table, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_shard.testing import fake_ranks

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # as a program it is not there

from support.happens_before import Work
from support.simulated_device import Activity, SimulatedDevice

NUM_RANKS = 8
NUM_BLOCKS = 8
WIDTH = 256
NUM_ROWS = 16


class Block(nn.Module):
    """A feed-forward block: big weights and small biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # not always used

    def forward(self, x: torch.Tensor, scales: bool = True) -> torch.Tensor:
        hidden: torch.Tensor = self.narrow(self.wide(self.norm(x)).relu())
        return x + (hidden * self.scale if scales else hidden)


class Model(nn.Module):
    """Blocks with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, scales: bool = True) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scales)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        name: What it is called.
        dtype: Of compute; gradients are reduced in float32.
        replicas: How many ranks hold the same shards.
        is_offloaded: Whether shards are kept in memory of the host.
        scales: Whether all parameters get gradients on this rank.
    """

    name: str
    dtype: torch.dtype = torch.float32
    replicas: int = 1
    is_offloaded: bool = False
    scales: bool = True


SETTINGS = [
    Setting("fp32"),
    Setting("bf16", torch.bfloat16),
    Setting("bf16, 2 replicas", torch.bfloat16, replicas=2),
    Setting("bf16, a gradient is missing", torch.bfloat16, scales=False),
    Setting("bf16, offloaded", torch.bfloat16, is_offloaded=True),
]
CONTESTANTS = {"ours": 1, "ours, 2 ahead": 2, "fsdp2": 1}
LABELS = {
    "ours": "composable_shard",
    "ours, 2 ahead": "composable_shard, depth 2",
    "fsdp2": "torch FSDP2",
}


@dataclass(frozen=True)
class Figures:
    """What a device is given in a step; see above. A window is ``None`` where nothing is sent."""

    launches: int
    collectives: int
    host_waits: int
    memory: float
    forward_gather: float | None
    backward_gather: float | None
    reduce_scatter: float | None
    all_reduce: float | None
    faults: int


def shard(name: str, setting: Setting) -> nn.Module:
    """Return the model, sharded by one of the libraries: each block, then the root."""
    shards, policy, offload = _library(name)
    shape: tuple[int, ...] = (setting.replicas, NUM_RANKS // setting.replicas)
    names = ("replicate", "shard") if setting.replicas > 1 else ("shard",)
    mesh = init_device_mesh("cpu", shape[-len(names) :], mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh}
    if setting.dtype != torch.float32:
        options["mp_policy"] = policy(setting.dtype, torch.float32)
    if setting.is_offloaded:
        options["offload_policy"] = offload()
    model = Model()
    for block in model.blocks:
        shards(block, **options)
    sharded: Any = shards(model, **options)
    if CONTESTANTS[name] > 1:
        sharded.set_prefetch_depth(CONTESTANTS[name])
    return model


def _library(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    if name != "fsdp2":
        return fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy
    import torch.distributed.fsdp as fsdp2

    return fsdp2.fully_shard, fsdp2.MixedPrecisionPolicy, fsdp2.CPUOffloadPolicy


def step(model: nn.Module, device: SimulatedDevice, setting: Setting) -> tuple[Activity, int]:
    """Train a step; return its events, and the number of collectives in forward."""
    device.new_activity()
    dtype = setting.dtype if not dist.is_initialized() else torch.float32
    loss = model(torch.ones(NUM_ROWS, WIDTH, dtype=dtype), setting.scales).square().mean()
    num_in_forward = len(device.activity.communication)
    loss.backward()
    activity = device.new_activity()
    for param in model.parameters():
        param.grad = None
    return activity, num_in_forward


def plain(setting: Setting) -> tuple[int, int, int]:
    """Return the launches of the plain module, and the operations of a block, each way."""
    with SimulatedDevice() as device:
        whole, _ = step(Model().to(setting.dtype), device, setting)
        block, x = Block().to(setting.dtype), torch.ones(NUM_ROWS, WIDTH, dtype=setting.dtype)
        device.new_activity()
        out = block(x.requires_grad_(), setting.scales)
        forward = device.new_activity()
        out.sum().backward()
        backward = device.new_activity()
    return (
        whole.launches.total(),
        sum(flops for flops, _ in forward.flops),
        sum(flops for flops, _ in backward.flops),
    )


def measure(name: str, setting: Setting) -> Figures:
    """Count the work of the device in the third step."""
    num_launches, forward, backward = plain(setting)
    with fake_ranks(NUM_RANKS), SimulatedDevice() as device:
        model = shard(name, setting)
        for _ in range(3):
            activity, num_in_forward = step(model, device, setting)
        before = device.new_activity().peak_nbytes
    block_numel = sum(param.numel() for param in Block().parameters())

    def window(works: Sequence[Work], unit: int) -> float | None:
        return median(activity.beside(work) / unit for work in works) if works else None

    gathers = [w for w in activity.communication[:num_in_forward] if "gather" in w.op]
    later = activity.communication[num_in_forward:]
    return Figures(
        activity.launches.total() - num_launches,
        activity.collectives.total(),
        activity.host_waits.total(),
        (activity.peak_nbytes - before) / (block_numel * setting.dtype.itemsize),
        window(gathers, forward),
        window([w for w in later if "gather" in w.op], backward),
        window([w for w in later if "reduce_scatter" in w.op], backward),
        window([w for w in later if "allreduce" in w.op], backward),
        len(device.faults),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each setting; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS:
        names = [name for name in CONTESTANTS if not (setting.is_offloaded and name == "fsdp2")]
        figures = {name: measure(name, setting) for name in names}
        found[setting.name] = {name: one.__dict__ for name, one in figures.items()}
        rows = [[LABELS[name], *_cells(one)] for name, one in figures.items()]
        columns = ["", "launches", "sent", "waits", "memory", "gather fwd", "gather bwd"]
        columns += ["reduce", "all-reduce", "faults"]
        print_table(setting.name, columns, rows)
    if options.json:
        write_json(options.json, {"settings": found})
    return 0


def _cells(one: Figures) -> Iterator[str]:
    for value in one.__dict__.values():
        yield "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
