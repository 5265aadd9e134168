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
from torch import Tensor
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from composable_shard._torch.streams import has_streams

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


def _first_of(*names: str) -> str:
    """Return the name of a method in this version of torch."""
    return next(name for name in names if hasattr(ProcessGroup, name))


_ALL_GATHER = _first_of("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_REDUCE_SCATTER = _first_of("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def all_gather_flat(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup) -> Work:
    """All-gather each input into its output, all in one launch."""
    if inputs[0].is_complex():
        outputs, inputs = _as_real(outputs), _as_real(inputs)
    return cast(Work, getattr(group, _ALL_GATHER)(outputs, inputs))


def all_gather_single(output: Tensor, source: Tensor, group: ProcessGroup) -> Work:
    """All-gather one tensor into another, in a launch that is not coalesced."""
    return group._allgather_base(*_as_real([output, source]))


def all_gather_rows(output: Tensor, source: Tensor, group: ProcessGroup) -> None:
    """Gather ``source`` [numel] of all ranks into ``output`` [ranks, numel], and wait for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.view(-1), source, group=group)


def reduce_scatter_flat(
    outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, op: Any
) -> Work:
    """Reduce-scatter each input into its output, all in one launch."""
    if inputs[0].is_complex():
        outputs, inputs = _as_real(outputs), _as_real(inputs)
    return cast(Work, getattr(group, _REDUCE_SCATTER)(outputs, inputs, _options_for(op)))


def reduce_scatter_single(output: Tensor, whole: Tensor, group: ProcessGroup, op: Any) -> Work:
    """Reduce-scatter one tensor into another."""
    return reduce_scatter_flat([output], [whole], group, op)


@lru_cache
def _options_for(op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def _as_real(tensors: list[Tensor]) -> list[Tensor]:
    """View complex tensors as real ones, which all backends support."""
    return [torch.view_as_real(t).view(-1) if t.is_complex() else t for t in tensors]


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for ``device`` in ``group``: gloo, nccl, fake, threaded."""
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
        name = group._get_backend(device).name()
        if name not in ("custom", "undefined"):
            return str(name).lower()
    return str(dist.get_backend(group)).lower()


_pretended: str | None = None


@contextlib.contextmanager
def pretended_backend(name: str | None) -> Iterator[None]:
    """Make simulated ranks plan their messages as for this backend and its devices."""
    global _pretended
    before, _pretended = _pretended, name
    try:
        yield
    finally:
        _pretended = before


def aligns(device: torch.device) -> bool:
    """Return whether packed shards are aligned for the vectorized loads of devices."""
    return has_streams(device) or _pretended not in (None, "gloo")


def message_backend(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend to plan messages for; see :func:`pretended_backend`."""
    return _pretended or backend_name(group, device)


def is_fake(group: ProcessGroup) -> bool:
    """Return whether the collectives of a group do nothing."""
    return str(dist.get_backend(group)).lower() == "fake"


def store_of(group: ProcessGroup) -> dist.Store:
    """Return the store of ``group``, which prefixes its keys."""
    return distributed_c10d._world.pg_map[group][1]


def timeout_of(group: ProcessGroup) -> float:
    """Return the time-out of the collectives of a gloo group, in seconds."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def device_for(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return ``device`` if ``group`` can send from it, else the accelerator."""
    config = dist.distributed_c10d.get_backend_config(group)
    served = {item.partition(":")[0] for item in config.split(",") if ":" in item}
    if device.type in served or not served:
        return device
    accelerator = torch.accelerator.current_accelerator()
    return device if accelerator is None else torch.device(accelerator.type)


def average_is_supported(backend: str) -> bool:
    """Return whether the reduce-scatter of a backend supports ``ReduceOp.AVG``."""
    return backend in ("nccl", "xccl", "threaded", "fake")


def backend_allocator(group: ProcessGroup, device: torch.device) -> Allocate | None:
    """Return the memory allocator of a backend; ``None`` if it has none."""
    backend = group._get_backend(device)
    with contextlib.suppress(AttributeError, RuntimeError):
        if backend.supports_tensor_alloc(device):
            return lambda shape, dtype, where: backend.allocate_tensor(
                math.prod(shape), dtype=dtype, device=where
            ).view(tuple(shape))
    return None


def symmetric_memory_of_nccl() -> tuple[Allocate, Callable[[Tensor, ProcessGroup], Any]]:
    """Return a function that allocates symmetric memory, and one that registers it with a group."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    return allocate, lambda tensor, group: symmetric.rendezvous(tensor, group=group.group_name)


_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)


class _GlooOfOneWorker(_Gloo or object):  # type: ignore[misc]
    """Torch's ``ProcessGroupGloo`` with one worker."""

    def __init__(
        self, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, **more: Any
    ) -> None:
        if any(more.values()):  # arguments that only the plain constructor takes
            super().__init__(store, rank, num_ranks, timeout=timeout, **more)
            return
        options = _Gloo._Options()
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        options._devices = [_gloo_device(name, os.getpid()) for name in interfaces]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, num_ranks, options)


@functools.cache
def _gloo_device(interface: str, process: int) -> Any:
    """Return a gloo device that the groups of a process share, since each has a polling thread."""
    return _Gloo.create_device(interface=interface) if interface else _Gloo.create_default_device()


@contextlib.contextmanager
def gloo_of_one_worker() -> Iterator[None]:
    """Give the gloo process groups that are made inside one worker thread instead of two.

    Hazard: a worker that finishes a collective writes its name, such as "ALLGATHER_COALESCED", into
    a string of the group without a lock. Two workers that do so at once free the same memory; in
    torch 2.13 to 2.15, about one in 100,000 calls of ``DTensor.full_tensor`` fails. Guard: one
    worker. All ranks call the collectives of a group in one order, so none waits for a later one.
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


def new_local_group(ranks: list[int], backend: str, name: str, limit: float | None) -> ProcessGroup:
    """Make a process group; only its own ranks take part.

    Hazard: torch names such a group after its ranks and the number of groups in this process. That
    number differs if some processes are in more groups, and then the ranks wait for each other
    under different names. Guard: the caller passes the name. It holds for this thread alone, since
    ranks may be threads. Test: ``test_ranks_that_know_of_different_groups_make_one_together``.

    Args:
        ranks: Global ranks.
        backend: The backend.
        name: The name, unique in the job and the same on all of ``ranks``.
        limit: The time-out of its collectives in seconds; torch's default if absent.

    Collective: among ``ranks``.
    """
    distributed_c10d._process_group_name = _name_of_group
    _given.name = name
    try:
        with gloo_of_one_worker():
            timeout = None if limit is None else timedelta(seconds=limit)
            made = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
        return cast(ProcessGroup, made)
    finally:
        _given.name = None


def is_in_use(group: ProcessGroup) -> bool:
    """Return whether a process group exists: it was made and not destroyed."""
    return group in distributed_c10d._world.pg_map


def wait_for_workers(seconds: float) -> None:
    """Wait until the gloo worker threads of this process are idle.

    Hazard: a worker releases the tensors of a collective after it has ended, and takes the
    interpreter's lock for each. If the interpreter is shutting down, the process aborts. Guard:
    before that, this releases the lock until no worker has run for a while; a sleeping worker may
    be waiting for the lock. If the system has no /proc, it releases the lock once. Test:
    ``test_workers_let_go_of_tensors_before_the_end``.

    Args:
        seconds: The longest time to wait.
    """
    deadline, seen = time.monotonic() + seconds, _workers()
    while time.monotonic() < deadline:
        time.sleep(0.005)
        before, seen = seen, _workers()
        if before == seen and not any("R (running)" in status for status in seen.values()):
            return


def _workers() -> dict[str, str]:
    """Return the state of each gloo worker thread and its number of context switches."""
    found = {}
    for path in glob.glob("/proc/self/task/*/status"):
        with contextlib.suppress(OSError), open(path) as file:  # a thread may end meanwhile
            status = file.readlines()
            if status[0].endswith("\tpt_gloo_runloop\n"):
                state = [line for line in status if line.startswith(("State", "voluntary"))]
                found[path] = "".join(state)
    return found


def rebind(mesh: DeviceMesh) -> None:
    """Give an unpickled mesh process groups of this process.

    They have the same ranks as its former groups, and the same names if possible.

    Raises:
        ValueError: If another rank has pickled the mesh, or a group does not exist.
    """
    if not dist.is_initialized():
        raise ValueError("Expected the saved mesh, got no process group; make it before loading")
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    saved_by, rank = int(mesh.mesh[tuple(coordinate)]), dist.get_rank()
    if saved_by != rank:
        raise ValueError(
            f"Expected a module that rank {rank} has saved, got one of rank {saved_by}; let each "
            "rank save and load a file of its own"
        )
    names: list[Any] = []
    for axis, name in enumerate(mesh._dim_group_names):
        place: list[Any] = list(coordinate)
        place[axis] = slice(None)
        names.append(_name_of_ranks(mesh.mesh[tuple(place)].tolist(), name))
    mesh._dim_group_names = names
    mesh._pg_registry = {name: distributed_c10d._resolve_process_group(name) for name in names}


def _name_of_ranks(ranks: list[int], name: str) -> str:
    """Return the name of a process group of ``ranks``: ``name`` if it is one, else the first."""
    world = distributed_c10d._world
    groups = [group for group, members in world.pg_group_ranks.items() if list(members) == ranks]
    names = [str(world.pg_names[group]) for group in groups]
    if not names:
        raise ValueError(f"Expected a process group of ranks {ranks}, got none; create its mesh")
    return name if name in names else names[0]
