"""Collectives and memory of process groups."""

from __future__ import annotations

import contextlib
import functools
import glob
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from composable_shard._torch.streams import has_streams

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]

_ALL_GATHER = (
    "all_gather_single_coalesced"
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)
_REDUCE_SCATTER = (
    "reduce_scatter_single_coalesced"
    if hasattr(dist.ProcessGroup, "reduce_scatter_single_coalesced")
    else "reduce_scatter_tensor_coalesced"
)


def all_gather_flat(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """All-gather each input into its output, all in one launch."""
    return cast(dist.Work, getattr(group, _ALL_GATHER)(*_as_real(outputs, inputs)))


def all_gather_single(
    output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """All-gather one tensor into another, in a launch that is not coalesced."""
    (output,), (own,) = _as_real([output], [own])
    return group._allgather_base(output, own)


def all_gather_rows(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``own`` [numel] of all ranks into ``output`` [ranks, numel], and wait for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.view(-1), own, group=group)


def reduce_scatter_flat(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup,
    op: Any,
) -> dist.Work:
    """Reduce-scatter each input into its output, all in one launch."""
    reduce_scatter = getattr(group, _REDUCE_SCATTER)
    return cast(dist.Work, reduce_scatter(*_as_real(outputs, inputs), _options_for(op)))


def reduce_scatter_single(
    output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any
) -> dist.Work:
    """Reduce-scatter one tensor into another."""
    return reduce_scatter_flat([output], [whole], group, op)


@lru_cache
def _options_for(op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def _as_real(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """View complex tensors as pairs of real ones, all that backends know; dtypes are alike."""
    if not any(map(torch.is_complex, inputs)):
        return outputs, inputs
    return _real_views(outputs), _real_views(inputs)


def _real_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(t).view(-1) if t.is_complex() else t for t in tensors]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend that serves ``device`` in ``group``: gloo, nccl, fake, threaded, ..."""
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
        name = group._get_backend(device).name()
        if name not in ("custom", "undefined"):
            return str(name).lower()
    return str(dist.get_backend(group)).lower()


_pretended: str | None = None


@contextlib.contextmanager
def pretended_backend(name: str | None) -> Iterator[None]:
    """Let ranks that are not there plan their messages as this backend and its devices need."""
    global _pretended
    before, _pretended = _pretended, name
    try:
        yield
    finally:
        _pretended = before


def aligns(device: torch.device) -> bool:
    """Tell whether packed shards are aligned, as the loads of devices want them."""
    return has_streams(device) or _pretended not in (None, "gloo")


def message_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend for which messages are planned, which may be pretended."""
    return _pretended or backend_name(group, device)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Tell whether the collectives of a group do nothing."""
    return str(dist.get_backend(group)).lower() == "fake"


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store that the ranks of ``group`` share, with keys of its own."""
    return distributed_c10d._world.pg_map[group][1]


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return after how many seconds the collectives of a gloo group give up."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where ``group`` can send what is on ``device``: there, or on the accelerator."""
    config = dist.distributed_c10d.get_backend_config(group)
    served = {item.partition(":")[0] for item in config.split(",") if ":" in item}
    if device.type in served or not served:
        return device
    accelerator = torch.accelerator.current_accelerator()
    return device if accelerator is None else torch.device(accelerator.type)


def average_is_supported(backend: str) -> bool:
    """Tell whether ``ReduceOp.AVG`` exists in a backend's reduce-scatter."""
    return backend in ("nccl", "xccl", "threaded", "fake")


def backend_allocator(group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return what allocates memory that a backend likes best; ``None`` if it has no opinion."""
    backend = group._get_backend(device)
    with contextlib.suppress(AttributeError, RuntimeError):
        if backend.supports_tensor_alloc(device):
            return lambda shape, dtype, where: backend.allocate_tensor(
                math.prod(shape), dtype=dtype, device=where
            ).view(tuple(shape))
    return None


def symmetric_memory_of_nccl() -> tuple[Allocate, Callable[[torch.Tensor, dist.ProcessGroup], Any]]:
    """Return what allocates symmetric memory, and what makes it known to a process group."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    return allocate, lambda tensor, group: symmetric.rendezvous(tensor, group=group.group_name)


_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)


class _MeansGloo(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return _Gloo is not None and isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)


class _GlooOfOneWorker(metaclass=_MeansGloo):
    """Stands where torch looks for the class of gloo's process groups, and makes one of those."""

    def __new__(
        cls, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, **more: Any
    ) -> Any:
        if any(more.values()):  # what only the plain call can do
            return _Gloo(store, rank, num_ranks, timeout=timeout, **more)
        options = _Gloo._Options()
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        options._devices = [_gloo_device(name, os.getpid()) for name in interfaces]
        options._timeout = timeout
        options._threads = 1
        return _Gloo(store, rank, num_ranks, options)


@functools.cache
def _gloo_device(interface: str, process: int) -> Any:
    """Return a device that the groups of a process share: each has a thread that polls."""
    return _Gloo.create_device(interface=interface) if interface else _Gloo.create_default_device()


@contextlib.contextmanager
def gloo_of_one_worker() -> Iterator[None]:
    """Let process groups of gloo that are made inside have one worker instead of two.

    Hazard: a worker that has ended a collective writes its name, such as "ALLGATHER_COALESCED",
    into a string of the group without a lock. Two workers that do it at once free the same memory;
    torch 2.13 to 2.15 do, once in some 100,000 times ``DTensor.full_tensor``. Guard: one worker.
    Collectives of a group are in the same order on all ranks, so none waits for a later one.
    """
    if _Gloo is None:
        yield
        return
    torch_names = vars(distributed_c10d)
    before = torch_names["ProcessGroupGloo"]
    torch_names["ProcessGroupGloo"] = _GlooOfOneWorker
    try:
        yield
    finally:
        torch_names["ProcessGroupGloo"] = before


_unnamed = distributed_c10d._process_group_name
_given = threading.local()


def _name_of_group(*args: Any, **kwargs: Any) -> Any:
    return getattr(_given, "name", None) or _unnamed(*args, **kwargs)


def new_local_group(
    ranks: list[int], backend: str, name: str, timeout: float | None
) -> dist.ProcessGroup:
    """Make a process group that only its own ranks take part in making.

    Hazard: by itself torch names such a group after its ranks and the number of groups that this
    process knows of, which differs between processes of which some have groups that others have
    not; they would wait for each other under different names. Guard: the name is given, to this
    thread alone, since ranks may be threads. Test:
    ``test_ranks_that_know_of_different_groups_make_one_together``.

    Args:
        ranks: Ranks of the job.
        backend: What they communicate by.
        name: What no other group of the job is called; the same on all of ``ranks``.
        timeout: Seconds until its collectives give up; what torch takes by itself if absent.

    Collective: among ``ranks``.
    """
    distributed_c10d._process_group_name = _name_of_group
    _given.name = name
    try:
        with gloo_of_one_worker():
            limit = None if timeout is None else timedelta(seconds=timeout)
            made = dist.new_group(ranks, limit, backend, use_local_synchronization=True)
        return cast(dist.ProcessGroup, made)
    finally:
        _given.name = None


def is_in_use(group: dist.ProcessGroup) -> bool:
    """Tell whether a process group was made and has not been destroyed since."""
    return group in distributed_c10d._world.pg_map


def wait_for_workers(seconds: float) -> None:
    """Wait until the worker threads of gloo in this process have nothing left to do.

    Hazard: a worker lets go of the tensors of a work after that has ended, and takes the
    interpreter's lock for each. If the interpreter is ending by then, the process aborts. Guard:
    this, before it ends: it gives the lock away until no worker has run meanwhile. A worker that
    merely sleeps may wait for the lock. Where the system does not tell what threads do, it only
    gives the lock away for a moment. Test: ``test_workers_let_go_of_tensors_before_the_end``.

    Args:
        seconds: How long to wait at most.
    """
    deadline, seen = time.monotonic() + seconds, _workers()
    while time.monotonic() < deadline:
        time.sleep(0.005)
        before, seen = seen, _workers()
        if before == seen and not any("R (running)" in status for status in seen.values()):
            return


def _workers() -> dict[str, str]:
    """Return of each worker thread of gloo what it does, and how often it has slept."""
    found = {}
    for path in glob.glob("/proc/self/task/*/status"):
        with contextlib.suppress(OSError), open(path) as file:  # a thread may end meanwhile
            status = file.readlines()
            if status[0].endswith("\tpt_gloo_runloop\n"):
                told = [line for line in status if line.startswith(("State", "voluntary"))]
                found[path] = "".join(told)
    return found


def rebind(mesh: DeviceMesh) -> None:
    """Let a mesh that was unpickled use the process groups of this process.

    They have the ranks that those of the mesh had, and the same names if there are such.

    Raises:
        ValueError: If this is not the rank that pickled it, or some group does not exist.
    """
    if not dist.is_initialized():
        raise ValueError(
            "Expected the process group that a saved module was sharded over, got none; call "
            "torch.distributed.init_process_group, and make the same mesh, before loading"
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    saved_by, rank = int(mesh.mesh[tuple(coordinate)]), dist.get_rank()
    if saved_by != rank:
        raise ValueError(
            f"Expected what rank {rank} has saved, got what rank {saved_by} has, which holds the "
            "shards of that rank; let each rank save and load a file of its own"
        )
    names: list[Any] = []
    for axis, name in enumerate(mesh._dim_group_names):
        place: list[Any] = list(coordinate)
        place[axis] = slice(None)
        names.append(_name_of_ranks(mesh.mesh[tuple(place)].tolist(), name))
    mesh._dim_group_names = names
    mesh._pg_registry = {name: distributed_c10d._resolve_process_group(name) for name in names}


def _name_of_ranks(ranks: list[int], name: str) -> str:
    """Return the name of a process group of ``ranks``: the given one, or the first made."""
    world = distributed_c10d._world
    names = [
        str(world.pg_names[group])
        for group, members in world.pg_group_ranks.items()
        if list(members) == ranks
    ]
    if not names:
        raise ValueError(
            f"Expected a process group of the ranks {ranks}, as the mesh of a saved module had, "
            "got none; make the same mesh before loading"
        )
    return name if name in names else names[0]
