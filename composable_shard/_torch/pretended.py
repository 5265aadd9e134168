"""Process groups within one process: of threads, and of ranks that are not there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from composable_shard._torch.rehearsed import fake_tensors


@contextlib.contextmanager
def threaded_world() -> Iterator[Callable[[BaseException], None]]:
    """Give each thread a process group of its own; yield what wakes threads that wait."""
    # Imported late: only those who test with threads depend on them.
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed import multi_threaded_pg

    backend: Any = multi_threaded_pg  # neither module is typed
    bindings: Any = _distributed_c10d
    if not hasattr(backend.ThreadLocalWorld, "comms"):  # torch 2.11 looks for it and has none
        backend.ThreadLocalWorld.comms = []
    _enter_fake_mode()
    bindings._set_thread_isolation_mode(True)
    backend._install_threaded_pg()
    try:
        yield backend.ProcessLocalGroup.exception_handle
    finally:
        backend.ProcessLocalGroup.reset()
        backend._uninstall_threaded_pg()
        bindings._set_thread_isolation_mode(False)


@functools.cache
def _enter_fake_mode() -> None:
    """Enter torch's fake mode once, in one thread.

    Hazard: where torch is built for CUDA and there is no device, the first entry replaces what
    guards devices; several threads that do so at once, in the first operations on DTensors, crash
    the process. Guard: the first entry is before them. Test: all of ``run_threads``, on a machine
    without a device, with a torch that is built for one.
    """
    with fake_tensors():
        pass


def fake_store() -> dist.Store:
    """Return the store of the backend ``fake``, which this registers."""
    from torch.testing._internal.distributed import fake_pg

    store: dist.Store = fake_pg.FakeStore()
    return store
