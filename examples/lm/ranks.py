"""The ranks that train together: those of ``torchrun``, or processes that this module starts."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The time-out of the process group.
PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Place:
    """The rank and the device of this process."""

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0


Job = Callable[[Place], None]


def under_torchrun() -> bool:
    """Return whether this process is one of the ranks that ``torchrun`` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_restarted() -> bool:
    """Return whether ``torchrun`` has started the ranks again, after one of them died."""
    return under_torchrun() and _num_restarts() > 0


def _num_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def num_ranks_here(asked: int | None, device_type: str) -> int:
    """Return the number of ranks: torchrun's, ``asked``, or a default for the machine."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if device_type == "cuda":
        num_devices = torch.cuda.device_count()
        if asked is not None and asked > num_devices:
            raise ValueError(
                f"Expected at most {num_devices} ranks, one for each CUDA device, got {asked}: "
                "lower --ranks or pass --device cpu"
            )
        return asked or num_devices
    return asked or 2


def run_on_ranks(job: Job, num_ranks: int, device_type: str) -> None:
    """Run a job on every rank, and return when it has ended.

    Args:
        job: called on each rank; picklable.
        num_ranks: number of ranks.
        device_type: "cuda" (one device for each rank) or "cpu" (one thread for each rank).
    """
    # Set these before the libraries load. With one thread, ranks do not compete for cores and sums
    # have a fixed order. cuBLAS needs this workspace to sum in a fixed order.
    if device_type == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if under_torchrun():
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        _work(job, int(os.environ["RANK"]), num_ranks, device_type, local_rank, None)
        return
    with tempfile.TemporaryDirectory(prefix="train_lm_") as folder:
        meeting_point = Path(folder) / "ranks"
        try:
            mp.spawn(_start, args=(job, num_ranks, device_type, meeting_point), nprocs=num_ranks)
        except KeyboardInterrupt:
            sys.exit("stopped")


def _start(rank: int, job: Job, num_ranks: int, device_type: str, meeting_point: Path) -> None:
    # A rank gets SIGINT when its parent dies, and must end then. It may have inherited a handler
    # that ignores SIGINT, and would continue to write files while the run is resumed elsewhere.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _work(job, rank, num_ranks, device_type, rank, meeting_point)


def _work(
    job: Job,
    rank: int,
    num_ranks: int,
    device_type: str,
    local_rank: int,
    meeting_point: Path | None,
) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        torch.use_deterministic_algorithms(True, warn_only=True)
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
        device, backend = torch.device("cpu"), "gloo"
    store = dist.FileStore(str(meeting_point), num_ranks) if meeting_point else _torchrun_store()
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE)
    job(Place(rank, num_ranks, device))
    dist.destroy_process_group()


def _torchrun_store() -> dist.Store:
    """Return a store for the rendezvous of this attempt.

    After a restart, torchrun's store still contains the addresses of the previous ranks.
    """
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"attempt-{_num_restarts()}", store)
