"""Allocation of uninitialized memory, and its release: all of it goes through this module.

With ``COMPOSABLE_SHARD_POISON_MEMORY=1``, these functions fill memory when they allocate it and
before they free it: floats with NaN, integers and bytes with a pattern. A read that is too early or
too late then always gives wrong values; otherwise it may by luck give the right ones. Tests run
with it. Without it, these functions only allocate and free.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
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


_PAGE = mmap.PAGESIZE
_MAPPED_NBYTES = 1 << 17  # smaller pieces are copied as fast
_FIXED = mmap.MAP_PRIVATE | 0x10  # of mmap(2)
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


@functools.cache
def _mmap() -> Any:
    function, number = ctypes.CDLL(None, use_errno=True).mmap, ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_int64]
    function.restype = ctypes.c_void_p
    return function


def map_memory(
    address: int | None, nbytes: int, access: int, flags: int, file: int, start: int
) -> int | None:
    """Call ``mmap(2)``; return the address, or ``None`` on failure, with ``ctypes.get_errno()``."""
    got: int | None = _mmap()(address, nbytes, access, flags, file, start)
    return None if got == ctypes.c_void_p(-1).value else got


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
    begin = -(-storage.data_ptr() // _PAGE) * _PAGE
    length = (storage.data_ptr() + nbytes - begin) // _PAGE * _PAGE
    for advice in (_HUGE_PAGE, _POPULATE_WRITE):
        _advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
    return tensor


def is_big(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is worth keeping; with poison, of any host tensor."""
    return tensor.nbytes >= (_BIG_NBYTES if _poison is None else 1) and _is_of_host(tensor)


_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)  # not in every version


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory; a fake tensor is not, whatever its device."""
    return tensor.is_cpu and type(tensor) is torch.Tensor


_mappable: weakref.WeakValueDictionary[int, MappableMemory] = weakref.WeakValueDictionary()
_mapped: set[MappableMemory] = set()


class MappableMemory:
    """Host memory of a tensor, with pages that a mapping of a file can replace.

    Freed memory keeps its address, but has no pages.

    Hazard: the allocator gets memory with pages of a file, which it would take for its own. Guard:
    ``_mapped`` keeps such memory; :func:`unmap_unused` restores its pages and lets it go. Test:
    ``test_mapped_memory_is_freed_with_pages_of_its_own``.

    Args:
        tensor: It begins at a page.

    Attributes:
        storage: The storage of the tensor.
        has_been_mapped: Whether pages were ever replaced.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage, self._other = tensor.untyped_storage(), torch.UntypedStorage(0, device="cpu")
        self._begin, self._nbytes = tensor.data_ptr(), tensor.nbytes // _PAGE * _PAGE
        self._owners: set[object] = set()
        self.has_been_mapped = False

    def swap(self) -> None:
        """Take the memory out of the storage, or put it back."""
        _swap(self.storage, self._other)

    def map(self, address: int, nbytes: int, file: int, start: int, owner: object) -> bool:
        """Replace whole pages by pages of a file. A write copies the page first.

        Args:
            address: The address of the pages.
            nbytes: Their size.
            file: The descriptor of the file.
            start: The start of its pages.
            owner: An object to keep until :meth:`unmap`.

        Returns:
            Whether the pages were replaced; not if they are few, or if the system refuses.
        """
        if nbytes < (_MAPPED_NBYTES if _poison is None else _PAGE):
            return False
        self.has_been_mapped = True
        _mapped.add(self)
        self._owners.add(owner)
        return map_memory(address, nbytes, _READ_WRITE, _FIXED, file, start) is not None

    def unmap(self) -> None:
        """Drop all pages if some are those of a file; the content is then undefined."""
        if self._owners:
            self.drop_pages()

    def is_in_place(self) -> bool:
        """Return whether the storage has this memory or none; `share_memory_` gives it another."""
        return not self.storage.size() or 0 <= self._begin - self.storage.data_ptr() < _PAGE

    def drop_pages(self) -> None:
        """Replace all pages by new ones, which take no memory until they are used."""
        if self._nbytes and self.is_in_place():
            map_memory(self._begin, self._nbytes, _READ_WRITE, _FIXED | mmap.MAP_ANONYMOUS, -1, 0)
        self._owners.clear()
        _mapped.discard(self)


def unmap_unused() -> None:
    """Unmap memory that no tensor refers to any more, which frees it."""
    for memory in list(_mapped):
        if torch._C._storage_Use_Count(memory.storage._cdata) == 1:
            memory.unmap()


def mappable_memory(tensor: torch.Tensor) -> MappableMemory | None:
    """Return the memory of a tensor, if its pages can be replaced."""
    memory = _mappable.get(storage_number(tensor))
    return memory if memory is not None and memory.is_in_place() else None


def empty_mappable(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized tensor of the host; if it is big, in :class:`MappableMemory`."""
    made = torch.empty(numel + _PAGE // dtype.itemsize, dtype=dtype, device="cpu")
    if _swap is None or not is_big(made):
        return empty(numel, dtype=dtype, device="cpu")
    tensor = made[-made.data_ptr() % _PAGE // dtype.itemsize :][:numel]
    _mappable[storage_number(tensor)] = memory = MappableMemory(tensor)
    tensor.__dict__["memory"] = memory  # keeps it
    return tensor


def allocate(tensor: torch.Tensor) -> None:
    """Allocate the memory of a tensor that fills its storage or is mappable, unless it has some."""
    storage = tensor.untyped_storage()
    nbytes = tensor.nbytes
    if storage.size() < nbytes:
        if (memory := mappable_memory(tensor)) is not None:
            memory.swap()
            if not memory.has_been_mapped:
                with_pages(tensor)
        else:
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
    if storage.size() and (memory := mappable_memory(tensor)) is not None:
        memory.drop_pages()
        memory.swap()
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
    if may_stay or is_big(tensor) or mappable_memory(tensor) is not None:
        return (lambda: allocate(tensor)), (lambda: free(tensor))
    storage = tensor.untyped_storage()
    return partial(storage.resize_, tensor.nbytes), partial(storage.resize_, 0)


def storage_number(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)


storages_of: Callable[..., Iterator[Any]] = partial(map, torch.Tensor.untyped_storage)
"""Returns the storage objects of tensors; as long as one is referred to, it is the same object."""


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
