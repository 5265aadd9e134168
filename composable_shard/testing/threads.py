"""Ranks as threads of this process: quick to start, and every rank in one debugger."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore

from composable_shard import _torch
from composable_shard.testing.rank_errors import PackedFailure, RankError, RankFailure, RankTimeout

Result = TypeVar("Result")


def run_threads(
    fn: Callable[..., Result], num_ranks: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on `num_ranks` ranks that are threads of this process.

    Each thread has its own default process group, over torch's thread-local test backend.
    Tensors are shared, not copied, so `fn` may close over anything and return anything.
    The threads share the global random generator: give each rank a generator of its own
    where the numbers matter.

    Args:
        fn: called once per thread.
        num_ranks: the world size.
        timeout: seconds after which the call is given up. A thread cannot be killed: one
            that waits in a collective is woken, one that loops goes on in the background.

    Returns:
        The results in rank order.

    Raises:
        RankError: a rank raised; the ranks that then waited for it are listed as unfinished.
        RankTimeout: a rank did not finish in time and none raised.

    Example:
        >>> import torch.distributed as dist
        >>> run_threads(lambda: dist.get_rank(), 3)
        [0, 1, 2]
    """
    if num_ranks < 1:
        raise ValueError(f"Expected num_ranks of at least 1, got {num_ranks}")
    outcome = _Outcome(num_ranks)
    with _threaded_world() as release:

        def run_rank(rank: int) -> None:
            try:
                dist.init_process_group(
                    "threaded", rank=rank, world_size=num_ranks, store=outcome.store
                )
                outcome.results[rank] = fn(*args, **kwargs)
                dist.destroy_process_group()
            except SystemExit:
                pass  # how the backend ends a rank that waits for one that is gone
            except BaseException as error:  # noqa: BLE001 (the caller shall see it)
                outcome.failures.append(PackedFailure.pack(error).unpack(rank))
                release(error)
            finally:
                _torch.clear_sharding_cache()

        threads = [
            threading.Thread(target=run_rank, args=(rank,), daemon=True, name=f"rank{rank}")
            for rank in range(num_ranks)
        ]
        _join(threads, timeout, release)
    return outcome.collect(timeout)


@dataclass
class _Outcome:
    """What the threads have left behind."""

    num_ranks: int
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    store: HashStore = field(default_factory=HashStore)

    def collect(self, timeout: float) -> list[Any]:
        failed = {failure.rank for failure in self.failures}
        unfinished = set(range(self.num_ranks)) - failed - self.results.keys()
        if self.failures:
            raise RankError(self.num_ranks, self.failures, sorted(unfinished))
        if unfinished:
            reason = f"The call took more than {timeout:g} s"
            raise RankTimeout(self.num_ranks, (), sorted(unfinished), reason=reason)
        return [self.results[rank] for rank in range(self.num_ranks)]


@contextlib.contextmanager
def _threaded_world() -> Iterator[Callable[[BaseException], None]]:
    """Give each thread a process group of its own; yield what wakes threads that wait."""
    # Private parts of torch, imported late: only who tests with threads depends on them.
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
    with _torch.fake_tensors():
        pass


def _join(
    threads: list[threading.Thread], timeout: float, release: Callable[[BaseException], None]
) -> None:
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        release(TimeoutError())
        for thread in threads:
            thread.join(1.0)
