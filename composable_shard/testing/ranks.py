"""Run a function on N ranks: as processes, as threads, or as one rank that pretends.

`run_on_ranks` takes the backend as an argument: processes that are kept for the next call, with
gloo between them (`run_ranks`), or threads of this process (`run_threads`). `fake_ranks` makes one
process a rank of any world size whose collectives do nothing, for what depends on shapes and
placements alone.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore

from composable_shard import _torch
from composable_shard.arguments import check_int
from composable_shard.testing.processes import (
    PackedFailure,
    RankError,
    RankFailure,
    RankPool,
    RankTimeout,
)

# Ranks as threads of this process: quick to start, and every rank in one debugger -----------------

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
    check_int("num_ranks", num_ranks, 1)
    outcome = _Outcome(num_ranks)
    with _torch.threaded_world() as release:

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


# Run a function on N ranks: as processes, as threads, or as one rank that pretends ----------------

__all__ = [
    "RankError",
    "RankFailure",
    "RankTimeout",
    "fake_ranks",
    "run_on_ranks",
    "run_ranks",
    "run_threads",
    "stop_ranks",
]


_POOLS: dict[int, RankPool] = {}
_LOCK = threading.RLock()
_SHORTEST_POOL_TIMEOUT = 60.0


def run_on_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    backend: Literal["gloo", "threads"] = "gloo",
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on ranks that form one process group.

    Args:
        fn: What to run. For `"gloo"` a function that other processes can import.
        world_size: How many ranks.
        args: Sent to every rank.
        backend: `"gloo"`: real processes, kept for the next call (see `run_ranks`). `"threads"`:
            threads of this process, which start at once, share the random state, may run any
            function, and stop in your debugger (see `run_threads`).
        timeout: Seconds after which the call is given up.
        kwargs: Sent to every rank.

    Returns:
        The results in rank order.

    Raises:
        RankError: A rank raised; the text has each rank's traceback.
        RankTimeout: A rank did not finish in time.
        ValueError: The backend is another, or `world_size` or `timeout` is not positive.

    Example:
        >>> import torch.distributed as dist
        >>> run_on_ranks(dist.get_world_size, 2)
        [2, 2]
        >>> run_on_ranks(lambda: dist.get_rank() * 10, 3, backend="threads")
        [0, 10, 20]
    """
    if backend not in ("gloo", "threads"):
        raise ValueError(f"Expected backend 'gloo' or 'threads', got {backend!r}")
    run = run_ranks if backend == "gloo" else run_threads
    return run(fn, world_size, *args, timeout=timeout, **kwargs)


def run_ranks(
    fn: Callable[..., Result], num_ranks: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on `num_ranks` processes that form one gloo process group.

    The processes use one thread each. They start at the first call for a world size (which
    takes seconds) and serve later calls in milliseconds; `stop_ranks` ends them, and so does
    the end of this process. Every call starts from `torch.manual_seed(0)`. Other global state
    that `fn` changes stays changed for the next call. A script that calls this needs the
    usual `if __name__ == "__main__":`.

    Args:
        fn: a function that the processes can import (module-level, or a partial of one).
        num_ranks: the world size.
        timeout: seconds after which the ranks are killed.
        args: sent to every rank by pickle, tensors by value.
        kwargs: the same.

    Returns:
        The results in rank order. They travel back by pickle.

    Raises:
        RankError: a rank raised. `failures` holds each rank's type, message and traceback;
            `agreed()` asserts that they are the same on all ranks.
        RankTimeout: a rank did not finish in time; tells where it stood.
        TypeError: `fn` or its arguments cannot be pickled.
        ValueError: `num_ranks` or `timeout` is not positive.

    Example:
        >>> import torch.distributed as dist
        >>> run_ranks(dist.get_rank, 2)
        [0, 1]
    """
    check_int("num_ranks", num_ranks, 1)
    if timeout <= 0:
        raise ValueError(f"Expected a timeout of more than 0 s, got {timeout}")
    payload = _pickle_call(fn, args, kwargs)
    with _LOCK:
        return _pool(num_ranks, timeout).call(payload, timeout)


def stop_ranks() -> None:
    """End all rank processes of this process. The next `run_ranks` starts new ones.

    Example:
        >>> stop_ranks()
    """
    with _LOCK:
        while _POOLS:
            _POOLS.popitem()[1].stop()


@contextlib.contextmanager
def fake_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of `num_ranks` while the context lasts.

    Collectives return at once and leave their outputs as they were, so shapes, placements
    and errors are true, and values are not.

    Args:
        num_ranks: the world size to pretend.
        rank: the rank to be.

    Raises:
        TypeError: `num_ranks` is no int.
        ValueError: `num_ranks` is not positive, or `rank` is not in `range(num_ranks)`.
        RuntimeError: this process already has a process group.

    Example:
        >>> import torch.distributed as dist
        >>> with fake_ranks(512, rank=7):
        ...     print(dist.get_rank(), dist.get_world_size())
        7 512
    """
    check_int("num_ranks", num_ranks, 1)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"Expected a rank from 0 to {num_ranks - 1}, got {rank}")
    if dist.is_initialized():
        raise RuntimeError(
            "Expected no process group, got one of backend "
            f"{dist.get_backend()!r}; call torch.distributed.destroy_process_group() first"
        )
    store = _torch.fake_store()
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _pool(num_ranks: int, timeout: float) -> RankPool:
    pool = _POOLS.get(num_ranks)
    if pool is not None and pool.alive and pool.timeout >= timeout:
        return pool
    if pool is not None and pool.alive:
        pool.stop()
    pool = _POOLS[num_ranks] = RankPool(num_ranks, max(timeout, _SHORTEST_POOL_TIMEOUT))
    return pool


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"Expected a module-level function and arguments that can be pickled, got {fn!r}: "
            f"{error}"
        ) from error


atexit.register(stop_ranks)
