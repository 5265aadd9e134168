"""Copying from and to the memory of ranks on the same host, where the system allows it.

Linux lets a process copy out of another one of the same user (``process_vm_readv``) and into it,
which costs a fraction of sending the same bytes through a socket. Whether it works depends on
namespaces and on security modules, so ranks try it once and agree: only pairs that can both read
each other do.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import sys
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.errors import ShardError

LONGEST_COPY = 1 << 30  # bytes; the system call copies at most 2 GiB at once
SWITCH = "COMPOSABLE_SHARD_READ_NEAR_MEMORY"
_NUM_SECRETS = 4  # 32 bytes that no other process has at the same address by chance

_near: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = weakref.WeakKeyDictionary()


class _Span(ctypes.Structure):
    """A piece of an address space, as the system call wants it."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def near_ranks(group: dist.ProcessGroup) -> dict[int, int]:
    """Return which other ranks of ``group`` are near, and the process that each is.

    Args:
        group: A process group that sends tensors of the CPU.

    Collective: two all-gathers of a few bytes at the first call for ``group``.
    """
    near = _near.get(group)
    if near is None:
        near = _near[group] = _try_all(group)
    return near


def read(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous tensor with the bytes at ``address`` of another process.

    Raises:
        ShardError: If the process has ended or has nothing there.
    """
    _copy("process_vm_readv", process, address, into)


def write(process: int, address: int, source: torch.Tensor) -> None:
    """Put the bytes of a contiguous tensor at ``address`` of another process.

    Raises:
        ShardError: If the process has ended or has nothing there.
    """
    _copy("process_vm_writev", process, address, source)


def _copy(name: str, process: int, address: int, own: torch.Tensor) -> None:
    call, start, nbytes, done = _system_call(name), own.data_ptr(), own.nbytes, 0
    assert call is not None and own.is_contiguous()
    while done < nbytes:
        span = min(nbytes - done, LONGEST_COPY)
        here, there = _Span(start + done, span), _Span(address + done, span)
        copied = call(process, here, 1, there, 1, 0)
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
    if not sys.platform.startswith("linux") or os.environ.get(SWITCH) == "0":
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True)[name]
    except (OSError, AttributeError):
        return None
    span, count = ctypes.POINTER(_Span), ctypes.c_ulong
    call.argtypes = [ctypes.c_int, span, count, span, count, count]
    call.restype = ctypes.c_ssize_t
    return call


def _try_all(group: dist.ProcessGroup) -> dict[int, int]:
    """Let every rank read a secret of every other; keep the pairs where both found the right one.

    Hazard: a process of the same number on another host, or in another container. Guard: it does
    not have this secret. Test: ``test_a_process_that_does_not_know_the_secret_is_not_near``.
    """
    rank, num_ranks = group.rank(), group.size()
    secret = torch.tensor([secrets.randbits(63) for _ in range(_NUM_SECRETS)])
    card = torch.tensor([os.getpid(), secret.data_ptr(), *secret.tolist()])
    cards = torch.empty(num_ranks, card.numel(), dtype=torch.int64)
    _torch.all_gather_rows(cards, card, group)
    processes = cards[:, 0].tolist()
    found = torch.tensor([peer != rank and _knows(*cards[peer]) for peer in range(num_ranks)])
    reads = torch.empty(num_ranks, num_ranks, dtype=torch.uint8)
    _torch.all_gather_rows(reads, found.to(torch.uint8), group)
    both = (reads * reads.t())[rank].tolist()
    return {peer: processes[peer] for peer in range(num_ranks) if both[peer]}


def _knows(process: torch.Tensor, address: torch.Tensor, *secret: torch.Tensor) -> bool:
    if _system_call("process_vm_readv") is None:
        return False
    seen = torch.zeros(_NUM_SECRETS, dtype=torch.int64)
    try:
        read(int(process), int(address), seen)
    except ShardError:
        return False
    return seen.tolist() == [int(number) for number in secret]
