"""One rank's process: it joins a gloo process group and answers calls that come by a pipe."""

from __future__ import annotations

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
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from composable_shard import _torch
from composable_shard.core.comms.failures import is_lost
from composable_shard.testing.rank_errors import PackedFailure

CALLS_PER_COLLECTION = 32
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Call(NamedTuple):
    """One call for one rank: where to import from, and the pickled (fn, args, kwargs)."""

    sys_path: list[str]
    payload: bytes

    def __call__(self) -> Any:
        sys.path[:] = self.sys_path
        fn, args, kwargs = pickle.loads(self.payload)
        torch.manual_seed(0)
        random.seed(0)
        return fn(*args, **kwargs)


class Settle(NamedTuple):
    """Asks a rank to pass a barrier, which shows that no collective is left half done."""

    def __call__(self) -> None:
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
