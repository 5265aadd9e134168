"""Run a function on N ranks: as processes, as threads, or as one rank that pretends.

`run_on_ranks` takes the backend as an argument: processes that are kept for the next call, with
gloo between them (`run_ranks`), or threads of this process (`run_threads`). `fake_ranks` makes one
process a rank of any world size with collectives that do nothing, to check shapes and
placements.

Starting a process costs seconds and a call should cost milliseconds, so the processes live on
between calls. They are kept only if no rank can have a collective pending: a call that does not
end the same way on every rank ends them, and the next call starts fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from composable_shard import _torch
from composable_shard.arguments import check_int, check_value
from composable_shard.core.transport.failures import is_lost, withdraw_failures

Result = TypeVar("Result")

# The errors of a call -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFailure:
    """One rank's exception, as far as it can travel between processes.

    Args:
        rank: the rank that raised.
        class_names: module and name of the exception's class, then those of its bases.
        message: `str(exception)`.
        traceback: the text that Python would have printed on that rank.
    """

    rank: int
    class_names: tuple[tuple[str, str], ...]
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RankFailure:
        """Describe an exception of this process."""
        names = tuple((base.__module__, base.__qualname__) for base in type(error).__mro__)
        return cls(rank, names, str(error), "".join(traceback.format_exception(error)))

    @property
    def type_name(self) -> str:
        """The name of the exception's own class."""
        return self.class_names[0][1]

    @property
    def exception_type(self) -> type[BaseException]:
        """The exception's class, or its nearest base that this process can import."""
        found = (getattr(sys.modules.get(module), name, None) for module, name in self.class_names)
        return next(one for one in found if isinstance(one, type))

    def __str__(self) -> str:
        head, body = f"[rank {self.rank}] {self.type_name}: {self.message}", self.traceback.rstrip()
        return f"{head}\n{body}" if body else head


class RankError(RuntimeError):
    """Some ranks raised. The text holds every failing rank's traceback.

    Args:
        num_ranks: the number of ranks that were called.
        failures: the exceptions of the failing ranks, in rank order.
        unfinished: ranks that had neither returned nor raised when the call was given up.
        stacks: the stack of each unfinished rank, if it is available.
        reason: why the call was given up, if no rank raised.
    """

    def __init__(
        self,
        num_ranks: int,
        failures: Sequence[RankFailure] = (),
        unfinished: Sequence[int] = (),
        stacks: Mapping[int, str] | None = None,
        reason: str = "",
    ) -> None:
        self.num_ranks = num_ranks
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        self.unfinished = tuple(sorted(unfinished))
        self.stacks = {rank: stack.rstrip() for rank, stack in sorted((stacks or {}).items())}
        self.reason = "" if failures else reason
        lines = [self.reason] if self.reason else []
        if self.failures:
            lines.append(f"{len(self.failures)} of {num_ranks} ranks failed:")
        lines += map(str, self.failures)
        if self.unfinished:
            lines.append(f"Ranks that had not finished: {list(self.unfinished)}")
        lines += [f"[rank {rank}] stack:\n{stack}" for rank, stack in self.stacks.items()]
        super().__init__("\n".join(lines))

    def agreed(self) -> RankFailure:
        """Return rank 0's failure if every rank raised the same type with the same text.

        Raises:
            AssertionError: a rank did not raise, or raised something else.
        """
        kinds = {(failure.type_name, failure.message) for failure in self.failures}
        if len(self.failures) != self.num_ranks or len(kinds) != 1:
            raise AssertionError(f"Expected one error on all ranks, got: {self}") from self
        return self.failures[0]


class RankTimeout(RankError):
    """Some ranks did not finish in time, and none of the others raised."""


# The process of one rank --------------------------------------------------------------------------

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
# Sub-groups made by earlier calls hold sockets and threads until the process ends.
MAX_OPEN_FILES = 256
GROUP_TIMEOUT = datetime.timedelta(days=1)
"""Longer than any call, so that the pool ends and explains a call that hangs."""


def serve(rank: int, num_ranks: int, port: int, stack_file: Path, pipe: Connection) -> None:
    """Be a rank: join the process group, then answer calls until the pipe closes."""
    _exit_with_parent(stack_file.parent)
    with contextlib.suppress(EOFError, OSError), open(stack_file, "w") as stacks:
        faulthandler.enable(stacks, all_threads=True)
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        with _torch.gloo_of_one_worker():  # also in groups that calls make
            _answer(rank, pipe, partial(_join_group, rank, num_ranks, port))
            gc.freeze()  # garbage collections then skip the objects of torch
            while True:
                _answer(rank, pipe, pipe.recv())
    # No shutdown of the process group: the other ranks exit for the same reason at the same time.
    os._exit(0)


def _answer(rank: int, pipe: Connection, fn: Callable[[], Any]) -> None:
    try:
        reply: bytes | RankFailure = pickle.dumps(fn())
    except BaseException as error:  # noqa: BLE001 (the caller gets any error)
        reply = RankFailure.of(error, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(reply)


def _call(path: list[str], payload: bytes) -> Any:
    """Run a pickled (fn, args, kwargs) with the ``sys.path`` of the caller."""
    sys.path[:] = path
    fn, args, kwargs = pickle.loads(payload)
    same_random_state()
    return fn(*args, **kwargs)


def same_random_state() -> None:
    """Seed torch and Python. Without a device, avoid torch.manual_seed, which records stacks."""
    has_device = torch.accelerator.is_available()
    (torch.manual_seed if has_device else torch.default_generator.manual_seed)(0)
    random.seed(0)


def _settle() -> bool:
    """Pass a barrier, which shows that no collective is incomplete.

    Returns:
        Whether the rank must not take more calls: a collective of its process group has failed, or
        it has too many files open.
    """
    withdraw_failures()  # the next call is another program, which has not failed
    dist.barrier()
    num_open_files = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    return num_open_files > MAX_OPEN_FILES or is_lost(cast(dist.ProcessGroup, dist.group.WORLD))


def _join_group(rank: int, num_ranks: int, port: int) -> None:
    # A terminal's interrupt reaches every process; the caller alone acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    # The host's name may not resolve on a test machine; all ranks are on this one anyway.
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", None, GROUP_TIMEOUT, num_ranks, rank, store)


def _exit_with_parent(folder: Path) -> None:
    """Exit and clean up when the caller is gone, even from a collective that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_after_parent() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=leave_after_parent, daemon=True, name="parent-watch").start()


# The processes of one world size ------------------------------------------------------------------

# Seconds. After one rank failed, the others get GRACE to fail too before they count as hanging.
GRACE = 5.0
START_TIMEOUT = 120.0
SETTLE_TIMEOUT = 20.0
STACK_TIMEOUT = 5.0
# The fork server imports these once for all ranks: modules of torch, and others if the caller has
# them. Our modules are listed by name, as the package imports them lazily.
PRELOAD = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "composable_shard.api", "composable_shard.insight.events"),
    *("einops", "pytest", "hypothesis"),
)


class RankPool:
    """The processes of one world size.

    Args:
        num_ranks: the world size.

    Raises:
        RankError: a process could not start. No process is left behind.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.alive = num_ranks, True
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        preload = [name for name in PRELOAD if name in sys.modules or name.startswith("torch")]
        context.set_forkserver_preload(preload)
        try:
            for rank in range(num_ranks):
                pipe, other_end = context.Pipe()
                self._pipes.append(pipe)
                port, file = self._store.port, self._stack_file(rank)
                arguments = rank, num_ranks, port, file, other_end
                # Not daemonic, as a rank may want children (a data loader's workers).
                process = context.Process(target=serve, args=arguments, name=f"rank{rank}")
                process.start()
                self._processes.append(process)
                other_end.close()
            self._gather(START_TIMEOUT, "The ranks did not start")
        except BaseException:
            self.stop(0)
            raise

    def call(self, payload: bytes, timeout: float) -> list[Any]:
        """Run a pickled (fn, args, kwargs) on every rank and return the results in rank order.

        Raises:
            RankError: a rank raised.
            RankTimeout: a rank did not finish within `timeout` seconds, or left a collective
                that the others did not take part in.
        """
        is_spent = True
        try:
            call = partial(_call, list(sys.path), payload)
            results = self._ask(call, timeout, f"The call took more than {timeout:g} s")
            what = "The call returned, but a collective of it is still open"
            is_spent = any(self._ask(_settle, SETTLE_TIMEOUT, what))
        except RankError as error:
            kinds = {failure.exception_type for failure in error.failures}
            if len(error.failures) == self.num_ranks and len(kinds) == 1:
                with contextlib.suppress(RankError):
                    is_spent = any(self._ask(_settle, SETTLE_TIMEOUT, ""))
            raise
        finally:
            if is_spent:
                self.stop(0)
        return results

    def stop(self, grace: float) -> None:
        """Close the pipes, on which the processes exit; kill the rest after `grace` seconds."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _ask(self, fn: Callable[[], Any], timeout: float, reason: str) -> list[Any]:
        """Call a function on every rank; raise if one fails or does not answer in time."""
        for pipe in self._pipes:
            # A rank that died since its last answer shows as end-of-file when we read from it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send(fn)
        return self._gather(timeout, reason)

    def _gather(self, timeout: float, reason: str) -> list[Any]:
        """Wait for one answer of every rank; raise if one failed or is missing."""
        results, failures = dict[int, bytes](), list[RankFailure]()
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for rank in map(waiting.pop, ready):
                reply = self._receive(rank)
                if isinstance(reply, bytes):
                    results[rank] = reply
                else:
                    failures.append(reply)
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures or waiting:
            kind, unfinished = RankError if failures else RankTimeout, list(waiting.values())
            stacks = self._dump_stacks(unfinished)
            raise kind(self.num_ranks, failures, unfinished, stacks, reason)
        return [pickle.loads(results[rank]) for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> bytes | RankFailure:
        try:
            return cast(bytes | RankFailure, self._pipes[rank].recv())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(GRACE)
            message = f"The process ended during the call, exit code {process.exitcode}"
            # It has written no stack if it was killed.
            return RankFailure(rank, (("builtins", "RuntimeError"),), message, self._stack(rank))

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Dump the stacks of ranks by their fault handlers, even while they hang in C code."""
        if not ranks or not hasattr(signal, "SIGUSR1"):
            return {}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, self._processes[rank].pid), signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT
        while time.monotonic() < deadline and not all(map(self._stack, ranks)):
            time.sleep(0.02)
        time.sleep(0.1)  # a rank that has begun to write soon finishes
        return {rank: stack for rank in ranks if (stack := self._stack(rank))}

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{rank}.txt"

    def _stack(self, rank: int) -> str:
        file = self._stack_file(rank)
        return file.read_text() if file.exists() else ""


# The public functions -----------------------------------------------------------------------------

_POOLS: dict[int, RankPool] = {}
_LOCK = threading.RLock()


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
        fn: The function. For `"gloo"` a function that other processes can import.
        world_size: The number of ranks.
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
        ValueError: The backend is unknown, or `world_size` or `timeout` is not positive.

    Example:
        >>> import torch.distributed as dist
        >>> run_on_ranks(dist.get_world_size, 2)
        [2, 2]
        >>> run_on_ranks(lambda: dist.get_rank() * 10, 3, backend="threads")
        [0, 10, 20]
    """
    runs = {"gloo": run_ranks, "threads": run_threads}
    check_value("backend", backend, backend in runs, "'gloo' or 'threads'")
    return runs[backend](fn, world_size, *args, timeout=timeout, **kwargs)


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
        RankTimeout: a rank did not finish in time; the text has its stack.
        TypeError: `fn` or its arguments cannot be pickled.
        ValueError: `num_ranks` or `timeout` is not positive.

    Example:
        >>> import torch.distributed as dist
        >>> run_ranks(dist.get_rank, 2)
        [0, 1]
    """
    check_int("num_ranks", num_ranks, 1)
    check_value("a timeout", timeout, timeout > 0, "of more than 0 s")
    try:
        payload = pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"Expected a module-level function and arguments that can be pickled, got {fn!r}: "
            f"{error}"
        ) from error
    with _LOCK:
        pool = _POOLS.get(num_ranks)
        if pool is None or not pool.alive:
            pool = _POOLS[num_ranks] = RankPool(num_ranks)
        return pool.call(payload, timeout)


def stop_ranks() -> None:
    """End all rank processes of this process. The next `run_ranks` starts new ones.

    Example:
        >>> stop_ranks()
    """
    with _LOCK:
        while _POOLS:
            _POOLS.popitem()[1].stop(GRACE)


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
            that waits in a collective is woken, and a thread that loops goes on in the background.

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
    store, results, failures = HashStore(), dict[int, Result](), list[RankFailure]()
    with _torch.threaded_world() as release:

        def run_rank(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
                results[rank] = fn(*args, **kwargs)
                dist.destroy_process_group()
            except SystemExit:
                pass  # the backend raises this on a rank that waits for a rank that is gone
            except BaseException as error:  # noqa: BLE001 (the caller gets it)
                failures.append(RankFailure.of(error, rank))
                release(error)
            finally:
                _torch.clear_sharding_cache()

        threads = [
            threading.Thread(target=run_rank, args=(rank,), daemon=True, name=f"rank{rank}")
            for rank in range(num_ranks)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            release(TimeoutError())
            for thread in threads:
                thread.join(1.0)
    failed = {failure.rank for failure in failures}
    unfinished = [rank for rank in range(num_ranks) if rank not in failed | results.keys()]
    if failures or unfinished:
        kind = RankError if failures else RankTimeout
        reason = f"The call took more than {timeout:g} s"
        raise kind(num_ranks, failures, unfinished, reason=reason)
    return [results[rank] for rank in range(num_ranks)]


@contextlib.contextmanager
def fake_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of `num_ranks` while the context lasts.

    Collectives return at once and leave their outputs as they were, so shapes, placements
    and errors are true, and values are not.

    Args:
        num_ranks: the pretended world size.
        rank: the pretended rank.

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
    check_value("a rank", rank, 0 <= rank < num_ranks, f"from 0 to {num_ranks - 1}")
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


atexit.register(stop_ranks)
