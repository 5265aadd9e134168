"""One process as rank 0 of any number of ranks; its collectives take no time on the device.

Torch's fake process group is not free: it fills the output of a gather by one copy for each rank
and tensor. On a GPU, these are hundreds of kernels for each collective of 512 ranks. The process
group here returns at once and leaves every output as it was, so a gathered tensor holds the
previous content of its memory. To libraries that ask for the backend it says NCCL, so both
libraries act as they would with NCCL.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.testing._internal.distributed import fake_pg

BACKEND = "silent"
COLLECTIVES = (  # by the names of torch 2.11 and of later versions
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "barrier",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)


class SilentGroup(dist.ProcessGroup):
    """Rank `rank` of `num_ranks`; it never communicates with the others."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> SilentGroup:
        return self

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name


def _finished_work() -> dist.Work:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


_FINISHED = _finished_work()


def _return_at_once(group: SilentGroup, *_: Any) -> dist.Work:
    return _FINISHED


for _collective in COLLECTIVES:
    setattr(SilentGroup, _collective, _return_at_once)

dist.Backend.register_backend(
    BACKEND,
    lambda store, rank, num_ranks, timeout: SilentGroup(rank, num_ranks),
    devices=["cpu", "cuda"],
)


@contextlib.contextmanager
def simulated_ranks(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `num_ranks` while the context lasts."""
    dist.init_process_group(BACKEND, rank=0, world_size=num_ranks, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def one_rank(device_type: str) -> Iterator[None]:
    """Make this process the only rank of a real process group while the context lasts."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def world(num_ranks: int, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Make this process rank 0 of `num_ranks`: of a real process group if it is the only one."""
    return one_rank(device_type) if num_ranks == 1 else simulated_ranks(num_ranks)
