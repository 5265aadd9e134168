"""How many bytes are live on a rank.

On an accelerator the caching allocator knows. On the CPU nothing counts tensors, but the C library
knows what its heap has handed out, which falls when a tensor is freed; the memory that the system
sees as resident often does not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch


class LiveMemory(NamedTuple):
    """Where live memory is read.

    Attributes:
        read: Returns bytes; ``None`` where nothing tells them.
        of: What is counted: ``device``, ``heap``, ``resident``, or ``nothing``.
    """

    read: Callable[[], int] | None
    of: str


def live_memory(device: torch.device) -> LiveMemory:
    """Return what tells the live memory of a rank that computes on ``device``."""
    if device.type == "cuda":
        return LiveMemory(partial(_of_cuda, device), "device")
    if device.type != "cpu":
        return LiveMemory(partial(torch.accelerator.memory_allocated, device), "device")
    heap = _heap()
    if heap is not None:
        return LiveMemory(heap, "heap")
    if os.path.exists(_RESIDENT):
        return LiveMemory(_resident, "resident")
    return LiveMemory(None, "nothing")


def _of_cuda(device: torch.device) -> int:
    stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
    return stats["allocated_bytes"]["all"]["current"] if stats else 0


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _heap() -> Callable[[], int] | None:
    """Return what reads the bytes in use of the heap of glibc, if that is the C library."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another library, or another system
        return None
    mallinfo.restype = _MallInfo

    def read() -> int:
        now = mallinfo()
        return int(now.uordblks + now.hblkhd)

    return read


_RESIDENT = "/proc/self/statm"


def _resident() -> int:
    with open(_RESIDENT) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
