"""Ranks as processes that stay: each is a rank of one gloo process group and waits for calls.

Starting a rank costs seconds and a call should cost milliseconds, so the ranks live on
between calls. They are kept only while they are surely in step: a call that does not end
the same way on every rank ends the pool, and the next call starts a fresh one.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from composable_shard import _torch
from composable_shard.core.transport.failures import go_on, is_lost

# What a call on several ranks raises in the caller: which rank failed, how, and where -------------


@dataclass(frozen=True)
class RankFailure:
    """One rank's exception, as far as it can travel between processes.

    Args:
        rank: the rank that raised.
        exception_type: the exception's class, or its nearest base that this process knows.
        type_name: the name of the exception's own class.
        message: `str(exception)`.
        traceback: the text Python would have printed on that rank.
    """

    rank: int
    exception_type: type[BaseException]
    type_name: str
    message: str
    traceback: str

    def __str__(self) -> str:
        head, body = f"[rank {self.rank}] {self.type_name}: {self.message}", self.traceback.rstrip()
        return f"{head}\n{body}" if body else head


class PackedFailure(NamedTuple):
    """A failure on the wire: classes go by name, as the receiver may not know them all."""

    class_names: tuple[tuple[str, str], ...]  # (module, name), from the class to its last base
    message: str
    traceback: str

    @classmethod
    def pack(cls, error: BaseException) -> PackedFailure:
        names = tuple((base.__module__, base.__qualname__) for base in type(error).__mro__)
        return cls(names, str(error), "".join(traceback.format_exception(error)))

    def unpack(self, rank: int) -> RankFailure:
        found = (getattr(sys.modules.get(module), name, None) for module, name in self.class_names)
        exception_type = next(one for one in found if isinstance(one, type))
        return RankFailure(
            rank, exception_type, self.class_names[0][1], self.message, self.traceback
        )


class RankError(RuntimeError):
    """Some ranks raised. The text holds every failing rank's traceback.

    Args:
        num_ranks: how many ranks were called.
        failures: what each failing rank raised, in rank order.
        unfinished: ranks that had neither returned nor raised when the call was given up.
        stacks: where each unfinished rank stood, when that could be found out.
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
        self.stacks = dict(stacks or {})
        self.reason = reason
        super().__init__(self._text())

    def agreed(self) -> RankFailure:
        """Return rank 0's failure if every rank raised the same type with the same text.

        Raises:
            AssertionError: a rank did not raise, or raised something else.
        """
        kinds = {(failure.type_name, failure.message) for failure in self.failures}
        if len(self.failures) != self.num_ranks or len(kinds) != 1:
            raise AssertionError(f"Expected one error on all ranks, got: {self}") from self
        return self.failures[0]

    def _text(self) -> str:
        lines = [self.reason] if self.reason else []
        if self.failures:
            lines.append(f"{len(self.failures)} of {self.num_ranks} ranks failed:")
            lines.extend(str(failure) for failure in self.failures)
        if self.unfinished:
            lines.append(f"Ranks that had not finished: {list(self.unfinished)}")
        for rank, stack in sorted(self.stacks.items()):
            lines.append(f"[rank {rank}] stood at:\n{stack.rstrip()}")
        return "\n".join(lines)


class RankTimeout(RankError):
    """Some ranks did not finish in time, and none of the others raised."""


# One rank's process: it joins a gloo process group and answers calls that come by a pipe ----------

CALLS_PER_COLLECTION = 32
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Call(NamedTuple):
    """One call for one rank: where to import from, and the pickled (fn, args, kwargs)."""

    sys_path: list[str]
    payload: bytes

    def __call__(self) -> Any:
        sys.path[:] = self.sys_path
        fn, args, kwargs = pickle.loads(self.payload)
        same_random_state()
        return fn(*args, **kwargs)


def same_random_state() -> None:
    """Seed torch and Python alike. Without a device, torch notes a stack for each kind of one."""
    has_device = torch.accelerator.is_available()
    (torch.manual_seed if has_device else torch.default_generator.manual_seed)(0)
    random.seed(0)


class Settle(NamedTuple):
    """Asks a rank to pass a barrier, which shows that no collective is left half done."""

    def __call__(self) -> None:
        go_on()  # the next call is another program, which has not failed
        dist.barrier()


class Done(NamedTuple):
    """A rank's answer.

    Attributes:
        result: The pickled result.
        num_open_files: How many files the rank has open.
        is_lost: Whether a collective of its process group has failed, so that it takes no more.
    """

    result: bytes
    num_open_files: int
    is_lost: bool


class Seat(NamedTuple):
    """What a rank's process has to know to take its place in the process group."""

    rank: int
    num_ranks: int
    port: int
    group_timeout: float
    stack_file: str


def serve(seat: Seat, pipe: Connection) -> None:
    """Be a rank: join the process group, then answer calls until the pipe closes."""
    _outlive_no_parent(Path(seat.stack_file).parent)
    try:
        with open(seat.stack_file, "w") as stack_file:
            faulthandler.enable(stack_file, all_threads=True)
            if hasattr(signal, "SIGUSR1"):
                faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
            with _torch.gloo_of_one_worker():  # also in groups that calls make
                _answer(pipe, lambda: _join_group(seat))
                gc.freeze()  # a collection then looks at what calls leave, not at all of torch
                for num_calls in range(1, sys.maxsize):
                    _answer(pipe, pipe.recv())
                    if num_calls % CALLS_PER_COLLECTION == 0:
                        gc.collect()
    except (EOFError, OSError):
        pass
    # Without a farewell to the other ranks: they leave for the same reason at the same time.
    os._exit(0)


def _answer(pipe: Connection, fn: Callable[[], Any]) -> None:
    reply: Done | PackedFailure
    try:
        reply = Done(pickle.dumps(fn()), _num_open_files(), _is_lost())
    except BaseException as error:  # noqa: BLE001 (whatever it is, the caller shall see it)
        reply = PackedFailure.pack(error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(reply)


def _is_lost() -> bool:
    world = dist.group.WORLD
    return world is not None and is_lost(world)


def _join_group(seat: Seat) -> None:
    # A terminal's interrupt reaches every process; the caller alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(seat.rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(seat.num_ranks)
    # The host's name may not resolve on a test machine; all ranks are on this one anyway.
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    dist.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", seat.port, is_master=False),
        rank=seat.rank,
        world_size=seat.num_ranks,
        timeout=datetime.timedelta(seconds=seat.group_timeout),
    )


def _outlive_no_parent(folder: Path) -> None:
    """Leave, and tidy up, when the caller is gone; even out of a collective that hangs."""
    parent = multiprocessing.parent_process()

    def leave_after_parent() -> None:
        if parent is not None:
            parent.join()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=leave_after_parent, daemon=True, name="parent-watch").start()


def _num_open_files() -> int:
    return len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0


# N processes that stay: each is a rank of one gloo process group and waits for calls --------------

# Seconds. After one rank failed, the others get GRACE to fail too before they count as hanging.
GRACE = 5.0
START_TIMEOUT = 120.0
SETTLE_TIMEOUT = 20.0
STACK_TIMEOUT = 5.0
# Sub-groups made by earlier calls hold sockets and threads that only a new process gives back.
MAX_OPEN_FILES = 256
# Modules of torch and of ours by name: what the package itself imports, it imports when asked.
PRELOAD = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "composable_shard.api", "composable_shard.insight.events"),
    *("einops", "pytest", "hypothesis"),
)


class RankPool:
    """The processes of one world size.

    Args:
        num_ranks: the world size.
        timeout: the longest call it shall serve, in seconds. The process group's own
            time-out is longer, so that a hanging call is ended (and explained) by the pool.

    Raises:
        RankError: a process could not start. No process is left behind.
    """

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(num_ranks):
                self._start_rank(rank)
            self._gather(START_TIMEOUT, "The ranks did not start")
        except BaseException:
            self.kill()
            raise

    def call(self, payload: bytes, timeout: float) -> list[Any]:
        """Run a pickled (fn, args, kwargs) on every rank and return the results in rank order.

        Raises:
            RankError: a rank raised.
            RankTimeout: a rank did not finish within `timeout` seconds, or left a collective
                that the others did not take part in.
        """
        try:
            self._send(Call(list(sys.path), payload))
            replies = self._gather(timeout, f"The call took more than {timeout:g} s")
            self._send(Settle())
            self._gather(SETTLE_TIMEOUT, "The call returned, but a collective of it is still open")
        except RankError as error:
            if not (_failed_alike(error) and self._is_in_step()):
                self.kill()
            raise
        except BaseException:
            self.kill()
            raise
        if any(reply.is_lost or reply.num_open_files > MAX_OPEN_FILES for reply in replies):
            self.stop()
        return [pickle.loads(reply.result) for reply in replies]

    def stop(self) -> None:
        """End the processes: they leave when their pipe closes; who does not is killed."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the processes at once, whatever they are doing."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _start_rank(self, rank: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preload())
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        seat = Seat(
            rank,
            self.num_ranks,
            self._store.port,
            self.timeout + START_TIMEOUT,
            str(self._stack_file(rank)),
        )
        # Not daemonic, as a rank may want children of its own (a data loader's workers).
        process = context.Process(target=serve, args=(seat, theirs), name=f"rank{rank}")
        process.start()
        self._processes.append(process)
        theirs.close()

    def _send(self, message: Call | Settle) -> None:
        for pipe in self._pipes:
            # A rank that died since its last answer shows as end-of-file when we read from it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send(message)

    def _gather(self, timeout: float, reason: str) -> list[Done]:
        """Wait for one answer of every rank; raise if one failed or is missing."""
        done: dict[int, Done] = {}
        failures: list[RankFailure] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in cast(list[Connection], ready):
                rank = waiting.pop(pipe)
                reply = self._receive(rank)
                if isinstance(reply, Done):
                    done[rank] = reply
                else:
                    failures.append(reply)
                    deadline = min(deadline, time.monotonic() + GRACE)
        unfinished = list(waiting.values())
        if failures:
            stacks = self._dump_stacks(unfinished)
            raise RankError(self.num_ranks, failures, unfinished, stacks)
        if unfinished:
            stacks = self._dump_stacks(unfinished)
            raise RankTimeout(self.num_ranks, (), unfinished, stacks, reason)
        return [done[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> Done | RankFailure:
        try:
            reply = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(GRACE)
            message = f"The process ended during the call, exit code {process.exitcode}"
            file = self._stack_file(rank)  # empty if it was killed
            crash = file.read_text() if file.exists() else ""
            return RankFailure(rank, RuntimeError, "RuntimeError", message, crash)
        return reply.unpack(rank) if isinstance(reply, PackedFailure) else reply

    def _is_in_step(self) -> bool:
        try:
            self._send(Settle())
            replies = self._gather(SETTLE_TIMEOUT, "")
        except RankError:
            return False
        return not any(reply.is_lost for reply in replies)

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Ask the ranks' fault handlers where they stand. Works while they hang in C code."""
        if not ranks or not hasattr(signal, "SIGUSR1"):
            return {}
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        files = {rank: self._stack_file(rank) for rank in ranks}
        deadline = time.monotonic() + STACK_TIMEOUT
        while time.monotonic() < deadline and any(not _num_bytes(file) for file in files.values()):
            time.sleep(0.02)
        time.sleep(0.1)  # who has begun to write has soon written all
        return {rank: file.read_text() for rank, file in files.items() if _num_bytes(file)}

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{rank}.txt"


def _preload() -> list[str]:
    """What the fork server imports once for all ranks: torch, and what the caller has too."""
    return [name for name in PRELOAD if name in sys.modules or name.startswith("torch")]


def _num_bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _failed_alike(error: RankError) -> bool:
    kinds = {failure.exception_type for failure in error.failures}
    return len(error.failures) == error.num_ranks and len(kinds) == 1
