"""Copying from and to the memory of another process on the same host.

Linux lets a process copy out of another one of the same user (``process_vm_readv``) and into it,
which costs a fraction of sending the same bytes through a socket.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from composable_shard.errors import ShardError

LONGEST_COPY = 1 << 30  # bytes; the system calls copy at most 2 GiB at once
_Member = TypeVar("_Member")

SWITCH = "COMPOSABLE_SHARD_READ_NEAR_MEMORY"


class _Span(ctypes.Structure):
    """A piece of an address space, as the system calls want it."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def outlives_interpreter(members: list[_Member]) -> list[_Member]:
    """Return a list whose members are never freed but by taking them out.

    Hazard: another process writes into memory that this one frees while its interpreter ends, and
    the heap is broken. Guard: a reference that nobody gives back. Test:
    ``test_what_others_may_write_to_is_not_freed_at_the_end``.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(members))
    return members


def is_offered() -> bool:
    """Tell whether the system has such calls, and the environment does not forbid their use."""
    return os.environ.get(SWITCH) != "0" and _system_call("process_vm_readv") is not None


def read(process: int, there: int, here: int, nbytes: int) -> None:
    """Copy ``nbytes`` from an address of another process to one of this process.

    Raises:
        ShardError: If the process has ended or has nothing there.
    """
    _copy("process_vm_readv", process, there, here, nbytes)


def write(process: int, there: int, here: int, nbytes: int) -> None:
    """Copy ``nbytes`` to an address of another process from one of this process.

    Raises:
        ShardError: If the process has ended or has nothing there.
    """
    _copy("process_vm_writev", process, there, here, nbytes)


def _copy(name: str, process: int, there: int, here: int, nbytes: int) -> None:
    call, done = _system_call(name), 0
    assert call is not None
    while done < nbytes:
        numel = min(nbytes - done, LONGEST_COPY)
        own, theirs = _Span(here + done, numel), _Span(there + done, numel)
        copied = call(process, own, 1, theirs, 1, 0)
        if copied <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise ShardError(
                f"Expected to copy {nbytes} bytes by {name} with process {process}, got {done} and "
                f"the error '{reason}'; has that rank ended? {SWITCH}=0 on all ranks sends "
                "everything through sockets"
            )
        done += copied


@functools.cache
def _system_call(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True)[name]
    except (OSError, AttributeError):
        return None
    span, count = ctypes.POINTER(_Span), ctypes.c_ulong
    call.argtypes = [ctypes.c_int, span, count, span, count, count]
    call.restype = ctypes.c_ssize_t
    return call
