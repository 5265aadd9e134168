"""Full weights of a sharded model: time and memory, compared with the ways that torch has.

The model is a small transformer with one group for each block. The three ways are `iter_full`,
`DTensor.full_tensor` of one parameter after another, and `get_model_state_dict` with
`full_state_dict=True` of torch.distributed.checkpoint. Each hands every tensor to a consumer, which
reads the first element and drops the tensor. Ranks are processes that communicate by gloo; in each
round, the three ways take turns. Memory is the peak of the memory that only this rank uses, minus
its value before the call, in a round of its own.

    python benchmarks/weights_out.py --ranks 2 4
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from composable_shard import fully_shard, iter_full

MIB = 2**20
M_MMAP_THRESHOLD = -3  # of mallopt


class Block(nn.Module):
    """The parameters of a block: matrices, biases and the weights of norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input; nothing is computed here."""
        return x


def build(width: int, num_blocks: int) -> nn.Module:
    """Return the sharded model."""
    model = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


# Contestants --------------------------------------------------------------------------------------

Tensors = Iterator[torch.Tensor]


def ours(model: nn.Module, bucket_mib: int) -> Tensors:
    """Yield the tensors of iter_full."""
    for _, full in iter_full(model, bucket_bytes=bucket_mib * MIB):
        yield full
        del full  # or it would be held while the next bucket is finished


def each(model: nn.Module) -> Tensors:
    """Yield the full tensor of one parameter after another."""
    for param in model.state_dict().values():
        yield param.full_tensor() if isinstance(param, DTensor) else param


def at_once(model: nn.Module) -> Tensors:
    """Yield from the full state dict."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    yield from state.values()


# Measuring ----------------------------------------------------------------------------------------


class Peak(threading.Thread):
    """Asks for the memory of this process again and again, and keeps the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.most = own_memory()
        self.is_over = False
        self.start()

    def run(self) -> None:
        """Ask until it is over."""
        while not self.is_over:
            self.most = max(self.most, own_memory())
            time.sleep(0.001)

    def grown(self) -> int:
        """Return by how many bytes it has grown at most."""
        self.is_over = True
        self.join()
        return self.most - self.before


def own_memory() -> int:
    """Return the resident bytes except those of files; shared memory counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return (found["RssAnon"] + found["RssShmem"]) * 1024


def consume(contestant: Callable[[], Tensors]) -> float:
    """Return how many seconds it takes until all ranks have had all tensors."""
    dist.barrier()
    start = time.perf_counter()
    for full in contestant():
        full.flatten()[:1].sum()
        del full
    dist.barrier()
    return time.perf_counter() - start


def measure(rank: int, num_ranks: int, folder: str, options: argparse.Namespace) -> None:
    """Be a rank; the first one leaves the figures of all in a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    model = build(options.width, options.blocks)
    contestants: dict[str, Callable[[], Tensors]] = {
        "iter_full": partial(ours, model, options.bucket_mib),
        "full_tensor of each": partial(each, model),
        "full state dict of DCP": partial(at_once, model),
    }
    # Larger tensors return to the system when they are freed, so all three show live memory.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 4)
    grown = {}
    for name, contestant in contestants.items():
        consume(contestant)  # builds caches
        peak = Peak()
        consume(contestant)
        grown[name] = peak.grown()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 32 * MIB)  # where it comes to by itself
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, contestant in contestants.items():
            seconds[name].append(consume(contestant))
    heard: list[dict[str, int]] = [{}] * num_ranks
    dist.all_gather_object(heard, grown)
    if rank == 0:
        most = {name: max(theirs[name] for theirs in heard) for name in contestants}
        found = {"seconds": seconds, "nbytes": most}
        Path(folder, f"{num_ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args(arguments)
    found = {}
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(
                measure, (num_ranks, folder, options), num_ranks, start_method="spawn"
            )
            found[num_ranks] = json.loads(Path(folder, f"{num_ranks}.json").read_text())
        show(num_ranks, **found[num_ranks])
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


def show(num_ranks: int, seconds: dict[str, list[float]], nbytes: dict[str, int]) -> None:
    """Print medians, and the ratios of our time and memory to the others'."""
    own, *others = seconds
    print(f"{num_ranks} ranks")
    print(f"  {own:24} {statistics.median(seconds[own]):7.3f} s  +{nbytes[own] // MIB} MiB")
    for name in others:
        pairs = zip(seconds[own], seconds[name], strict=True)
        time_share = statistics.median(mine / theirs for mine, theirs in pairs)
        print(
            f"  {name:24} {statistics.median(seconds[name]):7.3f} s  +{nbytes[name] // MIB} MiB   "
            f"ours: {time_share:.2f} of the time, {nbytes[own] / nbytes[name]:.2f} of the memory"
        )


if __name__ == "__main__":
    raise SystemExit(main())
