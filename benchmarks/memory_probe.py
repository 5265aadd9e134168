"""The growth of a contestant's resident memory, measured in a process that runs nothing else.

Resident memory is the memory in use plus the gaps between allocations in the C library's heap. The
gaps depend on the order of the allocations and can be half of the total. The probe measures both:
resident memory as in a user's process, and resident memory with each large tensor in a memory
mapping of its own, which leaves no gaps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch.distributed as dist
from contestants import Spec, build_contestant

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3
LARGE_TENSOR = 1 << 19  # bytes


def peak_growth(name: str, spec: Spec, num_steps: int, *, gaps: bool) -> int:
    """Build the contestant and train it; return the growth of peak resident memory in bytes.

    Counted are parameters, optimizer state, and whatever a step needs; not counted is what
    torch, the imports and the process group occupy by themselves.

    Args:
        gaps: keep the C library's usual heap; otherwise map large tensors one by one.
    """
    if not gaps:
        map_large_tensors()
    warm_up(name)
    baseline = reset_peak()
    contestant = build_contestant(name, spec)
    for step in range(num_steps):
        contestant.step(step)
    return peak_resident() - baseline


def map_large_tensors() -> None:
    """Fix the size from which glibc maps memory; by default, glibc raises it with use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR)


def warm_up(name: str) -> None:
    """Load what is loaded late: the contestant's modules, kernels, the backend's connections."""
    tiny = Spec(layers=1, width=64, batch=1, context=8)
    for each in ("single", name):
        build_contestant(each, tiny).step(0)
    dist.barrier()
    gc.collect()


def reset_peak() -> int:
    """Start a new peak where the system allows it; return where growth is counted from."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")
    return peak_resident()


def peak_resident() -> int:
    """Return the peak of this process's resident memory in bytes."""
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
