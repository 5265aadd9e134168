"""Measure the collectives that ``fully_shard`` will use, on ranks of this machine."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from composable_shard.core.comms.channel import Channel
from composable_shard.core.comms.neighbours import neighbours
from composable_shard.core.comms.offers import settle
from composable_shard.core.comms.streams import Waitable
from composable_shard.mesh import resolve_mesh

WARM_UPS = 2
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        num_ranks: Processes to start.
        device_type: Where they compute: ``"cpu"``, ``"cuda"``, ...
        nbytes: Size of the full buffer that is gathered and reduced.
        repeats: How often, after warming up.
        timeout: Seconds after which ranks are given up.
    """

    num_ranks: int
    device_type: str
    nbytes: int
    repeats: int
    timeout: float


@dataclass(frozen=True)
class Collective:
    """One collective as measured.

    Attributes:
        how: The class that does it.
        seconds: Median over repeats, of the slowest rank.
        nbytes_received: Bytes that one rank gets from the others.
        is_right: Whether the result was right on all ranks.
    """

    how: str
    seconds: float
    nbytes_received: int
    is_right: bool

    @property
    def bytes_per_second(self) -> float:
        """Bytes received by one rank in a second."""
        return self.nbytes_received / self.seconds


@dataclass(frozen=True)
class Measurement:
    """What ranks have found.

    Attributes:
        backend: What serves the device in the process group.
        num_threads: Compute threads of a rank.
        num_readable: Other ranks whose memory a rank may read; that of the rank with the fewest.
        all_gather: How it went.
        reduce_scatter: How it went.
    """

    backend: str
    num_threads: int
    num_readable: int
    all_gather: Collective
    reduce_scatter: Collective


def measure(request: Request) -> Measurement:
    """Start ranks, measure on each, and return what the slowest has found.

    Raises:
        TimeoutError: If the ranks do not end in time.
        Exception: What a rank raises, as ``torch.multiprocessing`` reports it.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = multiprocessing.start_processes(
            _be_rank, (request, folder), request.num_ranks, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + request.timeout
        try:
            while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"Expected {request.num_ranks} ranks to measure within "
                        f"{request.timeout:g} s, got no end"
                    )
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return _slowest(found)


def _slowest(found: list[dict[str, Any]]) -> Measurement:
    def merged(name: str) -> Collective:
        members = [rank[name] for rank in found]
        slowest = max(members, key=lambda member: member["seconds"])
        return Collective(**{**slowest, "is_right": all(one["is_right"] for one in members)})

    fewest = min(rank["num_readable"] for rank in found)
    collectives = {name: merged(name) for name in ("all_gather", "reduce_scatter")}
    return Measurement(**{**found[0], "num_readable": fewest, **collectives})


def _be_rank(rank: int, request: Request, folder: str) -> None:
    for variable in LAUNCHER_VARIABLES:  # those of a launcher around the doctor
        os.environ.pop(variable, None)
    device = torch.device("cpu")
    if request.device_type != "cpu":
        device = torch.device(request.device_type, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=request.num_ranks,
        timeout=datetime.timedelta(seconds=request.timeout),
    )
    try:
        found = _measure_rank(request, device)
        Path(folder, f"{rank}.json").write_text(json.dumps(asdict(found)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure_rank(request: Request, device: torch.device) -> Measurement:
    mesh = resolve_mesh(init_device_mesh(request.device_type, (request.num_ranks,)))
    channel, group = Channel(mesh), mesh.shard_group
    assert group is not None
    rank, num_ranks = group.rank(), group.size()
    numel = max(1, request.nbytes // (4 * num_ranks))
    shard = torch.full((numel,), float(rank + 1), device=device)
    full = torch.empty(num_ranks * numel, device=device)
    gather = _median(lambda: channel.gather([full], [shard]), channel, request)
    expected = torch.arange(1.0, num_ranks + 1, device=device)
    is_gathered = bool((full.view(num_ranks, numel) == expected[:, None]).all())
    full.fill_(float(rank + 1))
    reduce = _median(lambda: channel.reduce([shard], [full], None), channel, request)
    is_reduced = bool((shard == num_ranks * (num_ranks + 1) / 2).all())
    received = 4 * numel * (num_ranks - 1)
    is_direct = device.type == "cpu" and dist.get_backend(group) == "gloo"
    return Measurement(
        backend=str(dist.get_backend(group)),
        num_threads=torch.get_num_threads(),
        num_readable=len(neighbours(group)) if is_direct else 0,
        all_gather=Collective(type(channel.all_gather).__name__, gather, received, is_gathered),
        reduce_scatter=Collective(
            type(channel.reduce_scatter).__name__, reduce, received, is_reduced
        ),
    )


def _median(launch: Callable[[], list[Waitable]], channel: Channel, request: Request) -> float:
    """Return the median time of a collective, from launch until its result can be used."""
    seconds = []
    for _ in range(WARM_UPS + request.repeats):
        dist.barrier()
        start = time.perf_counter()
        for work in launch():
            work.wait()
        settle(dict.fromkeys(channel.tags, "measuring"))
        if request.device_type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])
