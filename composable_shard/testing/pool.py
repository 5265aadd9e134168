"""N processes that stay: each is a rank of one gloo process group and waits for calls.

Starting a rank costs seconds and a call should cost milliseconds, so the ranks live on
between calls. They are kept only while they are surely in step: a call that does not end
the same way on every rank ends the pool, and the next call starts a fresh one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from torch.distributed import TCPStore

from composable_shard.testing.rank_errors import PackedFailure, RankError, RankFailure, RankTimeout
from composable_shard.testing.rank_process import Call, Done, Seat, Settle, serve

# Seconds. After one rank failed, the others get GRACE to fail too before they count as hanging.
GRACE = 5.0
START_TIMEOUT = 120.0
SETTLE_TIMEOUT = 20.0
STACK_TIMEOUT = 5.0
# Sub-groups made by earlier calls hold sockets and threads that only a new process gives back.
MAX_OPEN_FILES = 256
PRELOAD = ("torch", "composable_shard", "einops", "pytest", "hypothesis")


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
