"""Safetensors files, by this library and by torch.distributed.checkpoint: time and memory.

Each of the four runs has processes of its own: two gloo ranks and a model of 201 MB in fp32. Memory
is the peak above that before the call, of a rank: all that is resident, mapped files included, and
what belongs to the process alone.

    python benchmarks/weights.py
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing, nn

from composable_shard import fully_shard, load_sharded, save_full

NUM_RANKS, NUM_MATRICES, WIDTH = 2, 12, 2048
MIB = 1024  # in the KiB that the system counts in


def build(device: str) -> nn.Sequential:
    """Return the sharded model."""
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_MATRICES)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def save_ours(folder: Path) -> Callable[[], object]:
    """Write one file."""
    model = build("cpu")
    return lambda: save_full(model, folder / "ours")


def save_theirs(folder: Path) -> Callable[[], object]:
    """Write the shards, and one file from them."""
    state = build("cpu").state_dict()
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "theirs"),
        fqn_to_index_mapping=dict.fromkeys(state, 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    return lambda: dcp.save(state, storage_writer=writer)


def load_ours(folder: Path) -> Callable[[], object]:
    """Read the file that ``save_ours`` has written."""
    model = build("meta")
    return lambda: load_sharded(model, folder / "ours")


def load_theirs(folder: Path) -> Callable[[], object]:
    """Read the same file."""
    state = build("meta").to_empty(device="cpu").state_dict()
    reader = dcp.HuggingFaceStorageReader(str(folder / "ours"))
    return lambda: dcp.load(state, storage_reader=reader)


class Peak(threading.Thread):
    """Asks for the memory of this process again and again, and keeps the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = memory()
        self.is_over = False

    def run(self) -> None:
        """Ask until it is over."""
        while not self.is_over:
            self.most = tuple(map(max, self.most, memory()))
            time.sleep(0.002)


def memory() -> tuple[int, ...]:
    """Return the resident MiB, and the resident MiB of anonymous memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return tuple(int(found[name]) // MIB for name in ("Rss", "Anonymous"))


def measure(rank: int, prepare: Callable[[Path], Callable[[], object]], folder: Path) -> None:
    """Run as a rank, and print the time and memory of one call."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{prepare.__name__}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    call = prepare(folder)
    dist.barrier()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    call()
    dist.barrier()
    seconds = time.perf_counter() - start
    peak.is_over = True
    peak.join()
    resident, own = (most - before for most, before in zip(peak.most, peak.before, strict=True))
    title = prepare.__name__.replace("_", " ")
    print(f"{title:12} rank {rank}: {seconds:.2f} s, resident +{resident} MiB, own +{own} MiB")
    dist.destroy_process_group()


def main() -> None:
    """Measure all four, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for prepare in (save_ours, save_theirs, load_ours, load_theirs):
            multiprocessing.start_processes(
                measure, (prepare, Path(folder)), NUM_RANKS, start_method="spawn"
            )


if __name__ == "__main__":
    main()
