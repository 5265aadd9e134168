"""Allocation of uninitialized memory, and its release: all of it goes through this module.

With ``COMPOSABLE_SHARD_POISON_MEMORY=1``, these functions fill memory when they allocate it and
before they free it: floats with NaN, integers and bytes with a pattern. A read that is too early or
too late then always gives wrong values; otherwise it may by luck give the right ones. Tests run
with it. Without it, these functions only allocate, keep and free.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from composable_shard._torch.dtensors import leaves, local_part

POISON_VARIABLE = "COMPOSABLE_SHARD_POISON_MEMORY"
POISON_OF_FLOATS = 0xFF
"""All floating-point dtypes, the 8-bit ones too, read this byte repeated as NaN."""
POISON_OF_INTEGERS = 0x5A


class _Poison:
    """Fills memory, also when the last reference frees it without a call.

    It keeps a reference to all watched memory. Once that is the only reference left, it fills the
    memory and drops the reference.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        self._lock = threading.RLock()  # ranks may be threads

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._watched.setdefault(storage._cdata, (storage, tensor.dtype))

    def sweep(self) -> None:
        """Fill and drop the memory without other references."""
        with self._lock:
            for key, (storage, dtype) in list(self._watched.items()):
                if torch._C._storage_Use_Count(key) == 1:
                    fill(storage, dtype)
                    del self._watched[key]


_poison = _Poison() if os.environ.get(POISON_VARIABLE) == "1" else None


def fill(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fill memory with poison, without bumping version counters."""
    is_float = dtype.is_floating_point or dtype.is_complex
    byte = POISON_OF_FLOATS if is_float else POISON_OF_INTEGERS
    if storage.device.type == "meta" or not storage.nbytes():  # fake tensors, too
        return
    if storage.device.type == "cpu":
        ctypes.memset(storage.data_ptr(), byte, storage.nbytes())
        return
    with torch.inference_mode(False), torch.no_grad():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(byte)


@contextlib.contextmanager
def poisoned_memory(enabled: bool) -> Iterator[None]:
    """Turn poisoning on or off in this process for a while, whatever the environment says."""
    global _poison
    before, _poison = _poison, _Poison() if enabled else None
    try:
        yield
    finally:
        _poison = before


def empty(
    *shape: int, dtype: torch.dtype, device: torch.device | str, pin_memory: bool = False
) -> torch.Tensor:
    """Make an uninitialized tensor."""
    made = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
    return made if _poison is None else poison_uninitialized(made)


def empty_like(
    tensor: torch.Tensor, *, device: torch.device | str | None = None, pin_memory: bool = False
) -> torch.Tensor:
    """Make an uninitialized tensor with the shape and strides of another."""
    return poison_uninitialized(torch.empty_like(tensor, device=device, pin_memory=pin_memory))


def poison_uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """Poison an uninitialized tensor that was made elsewhere; return it."""
    if _poison is not None:
        _poison.sweep()
        for leaf in leaves(local_part(tensor)):
            fill(leaf.untyped_storage(), leaf.dtype)
            _poison.watch(leaf)
    return tensor


def poison_when_unused(tensor: torch.Tensor) -> torch.Tensor:
    """Poison a tensor's memory when its last reference is gone; return the tensor."""
    if _poison is not None:
        _poison.watch(tensor)
    return tensor


def poison(address: int, nbytes: int) -> None:
    """Poison memory that belongs to no tensor and stays allocated."""
    if _poison is not None:
        ctypes.memset(address, POISON_OF_FLOATS, nbytes)


_HUGE_PAGE, _POPULATE_WRITE = 14, 23  # of madvise(2)
_BIG_NBYTES = 2 * 1024 * 1024  # the size of a huge page
_advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def with_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Populate the pages of a tensor that fills its storage and is about to be written; return it.

    This does nothing unless the memory is big and on the host. The allocator returns such memory to
    the system, so each page would fault in every step, for a tenth of the time of a step on the
    CPU. A system without these calls refuses them, which does no harm.
    """
    nbytes = tensor.nbytes
    if _advise is None or nbytes < _BIG_NBYTES or not _is_of_host(tensor):
        return tensor
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    for advice in (_HUGE_PAGE, _POPULATE_WRITE):
        _advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
    return tensor


def is_big(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is worth keeping; with poison, of any host tensor."""
    return tensor.nbytes >= (_BIG_NBYTES if _poison is None else 1) and _is_of_host(tensor)


_spare: deque[torch.UntypedStorage] | None = None
_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)  # not in every version


def keep_freed_memory() -> None:
    """From now on, keep big host memory that is freed for the next allocation.

    The allocator would return it to the system or split it, and the next gather would get fresh
    pages, which the system fills with zeros. The next big allocation takes the kept memory or frees
    it; there are never more than two pieces. On devices with streams, the caching allocator does
    this.
    """
    global _spare
    if _spare is None and _swap is not None:
        _spare = deque(maxlen=2)


def return_freed_memory() -> None:
    """Give kept memory back to the allocator, and keep no more."""
    global _spare
    _spare = None


def _takes_spare(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Take kept memory of the right size, if there is any; free the pieces that were kept before.

    Returns:
        Whether the storage has memory now.
    """
    spare, nbytes = _spare, tensor.nbytes
    while spare and not storage.size() and is_big(tensor):
        with contextlib.suppress(IndexError):  # ranks may be threads
            kept = spare.popleft()
            if kept.size() == nbytes:
                _swap(storage, kept)
                return True
    return False


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory; a fake tensor is not, whatever its device."""
    return tensor.is_cpu and type(tensor) is torch.Tensor


def allocate(tensor: torch.Tensor) -> None:
    """Allocate the memory of a tensor that fills its storage, if the storage is empty."""
    storage = tensor.untyped_storage()
    nbytes = tensor.nbytes
    if storage.size() != nbytes:
        if not _takes_spare(tensor, storage):
            storage.resize_(nbytes)
            with_pages(tensor)
        if _poison is not None:
            _poison.sweep()
            fill(storage, tensor.dtype)


def free(tensor: torch.Tensor) -> bool:
    """Free the memory of a tensor and of all its views; the tensor objects stay.

    Memory that is shared with a NumPy array cannot be freed; this warns and leaves it.

    Returns:
        Whether the memory was freed.
    """
    storage = tensor.untyped_storage()
    if not storage.resizable():
        warnings.warn(
            "Expected to free memory of unsharded parameters, got some that an array shares, such "
            "as weight.detach().numpy(), and the next gather overwrites it; keep a copy instead",
            stacklevel=2,
        )
        return False
    if _poison is not None:
        _poison.sweep()
        fill(storage, tensor.dtype)
    spare = _spare
    if spare is not None and storage.size() and is_big(tensor):
        freed = torch.UntypedStorage(0, device="cpu")
        _swap(freed, storage)
        spare.append(freed)
    else:
        storage.resize_(0)
    return True


def memory_ops(tensor: torch.Tensor, *, may_stay: bool = False) -> tuple[Callable[[], Any], ...]:
    """Return operations that allocate and free the memory of a tensor that fills its storage.

    Those of small tensors are builtins, which do not look whether an array shares the memory.

    Args:
        tensor: The tensor.
        may_stay: Whether the memory may be allocated already, or an array may share it.
    """
    if may_stay or is_big(tensor):
        return (lambda: allocate(tensor)), (lambda: free(tensor))
    storage = tensor.untyped_storage()
    return partial(storage.resize_, tensor.nbytes), partial(storage.resize_, 0)


def storage_number(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)


_storage_of, _number_of = torch.Tensor.untyped_storage, attrgetter("_cdata")


def storage_numbers(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the storage numbers of several tensors."""
    return list(map(_number_of, map(_storage_of, tensors)))


def num_uses(tensor: torch.Tensor) -> int:
    """Return the number of references to the storage of a tensor: one for each view."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Return the live and the reserved bytes of the caching allocator of an accelerator.

    The public functions also flatten all other statistics into a dict, which takes longer.
    """
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0, 0
    stats = torch._C._accelerator_getDeviceStats(device.index)
    live, reserved = stats["allocated_bytes"], stats["reserved_bytes"]
    return live["all"]["current"], reserved["all"]["current"]
