"""Memory that comes without values and goes, all of it through the functions of this module.

With ``COMPOSABLE_SHARD_POISON_MEMORY=1`` such memory is filled when it comes and before it goes:
floats with NaN, integers and bytes with a pattern. What is read too early or too late is then wrong
for certain, where by luck it would still hold the right values. Tests run with it; without it these
functions do nothing but allocate, keep and free.
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
"""The byte of which all floats are NaN, those of 8 bits too."""
POISON_OF_INTEGERS = 0x5A


class _Poison:
    """Fills memory, also that which nobody frees by a call.

    A tensor's memory goes with the last reference to it, unseen. So a reference is kept to all that
    is watched, and given up, after filling, once it is the only one.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        self._lock = threading.RLock()  # ranks may be threads

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._watched.setdefault(storage._cdata, (storage, tensor.dtype))

    def sweep(self) -> None:
        """Fill and let go of the memory to which nobody else refers any more."""
        with self._lock:
            for key, (storage, dtype) in list(self._watched.items()):
                if torch._C._storage_Use_Count(key) == 1:
                    fill(storage, dtype)
                    del self._watched[key]


_poison = _Poison() if os.environ.get(POISON_VARIABLE) == "1" else None


def fill(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fill memory with what no computation can take for a value, unseen by autograd."""
    is_float = dtype.is_floating_point or dtype.is_complex
    byte = POISON_OF_FLOATS if is_float else POISON_OF_INTEGERS
    if storage.device.type == "meta" or not storage.nbytes():  # of fake tensors, too
        return
    if storage.device.type == "cpu":
        ctypes.memset(storage.data_ptr(), byte, storage.nbytes())
        return
    with torch.inference_mode(False), torch.no_grad():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(byte)


@contextlib.contextmanager
def poisoned_memory(enabled: bool) -> Iterator[None]:
    """Turn the poison of this process on or off for a while, whatever the environment says."""
    global _poison
    before, _poison = _poison, _Poison() if enabled else None
    try:
        yield
    finally:
        _poison = before


def empty(
    *shape: int, dtype: torch.dtype, device: torch.device | str, pin_memory: bool = False
) -> torch.Tensor:
    """Make a tensor without values."""
    made = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
    return made if _poison is None else without_values(made)


def empty_like(
    tensor: torch.Tensor,
    *,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Make a tensor without values, shaped and laid out as another."""
    return without_values(torch.empty_like(tensor, device=device, pin_memory=pin_memory))


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that was made elsewhere, and whose values mean nothing yet."""
    if _poison is not None:
        _poison.sweep()
        for leaf in leaves(local_part(tensor)):
            fill(leaf.untyped_storage(), leaf.dtype)
            _poison.watch(leaf)
    return tensor


def poison_when_unused(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory counts as freed once nobody refers to it."""
    if _poison is not None:
        _poison.watch(tensor)
    return tensor


def poison(address: int, nbytes: int) -> None:
    """Let memory that is no tensor's count as freed now; it stays."""
    if _poison is not None:
        ctypes.memset(address, POISON_OF_FLOATS, nbytes)


_HUGE_PAGE, _POPULATE_WRITE = 14, 23  # of madvise(2)
_BIG_NBYTES = 2 * 1024 * 1024  # of a huge page
_advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def with_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that fills its storage, and is about to be written as a whole.

    If its memory is big and the host's, it has all of its pages. The allocator gives such memory
    back to the system, so that each page would be a fault of its own in every step: a tenth of the
    time of a step on the CPU. A system that does not know these calls refuses them, and nothing is
    lost.
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
    """Tell whether to look after where the memory of a tensor is; with poison, of any tensor."""
    return _is_kept(tensor, tensor.nbytes)


_NUM_SPARE = 2
_spare: deque[torch.UntypedStorage] | None = None
_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)  # not in every version


def keep_spare() -> None:
    """Keep big memory of the host that is freed from now on for what is allocated next.

    The allocator would give it back to the system, or cut other memory from it, and the next gather
    would have to fill fresh pages with zeros. The next big allocation takes what was freed, or lets
    go of it, and there are never more than two pieces. Where there are streams the allocator does
    this, which knows them.
    """
    global _spare
    if _spare is None and _swap is not None:
        _spare = deque(maxlen=_NUM_SPARE)


def return_spare() -> None:
    """Give kept memory back to the allocator, and keep no more."""
    global _spare
    _spare = None


def spare_storages() -> list[torch.UntypedStorage]:
    """Return the memory that is kept."""
    return list(_spare or ())


def _takes_spare(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Have kept memory of its size, if there is some; give back what was freed before it."""
    spare, nbytes = _spare, tensor.nbytes
    while spare and not storage.size() and _is_kept(tensor, nbytes):
        with contextlib.suppress(IndexError):  # ranks may be threads
            one = spare.popleft()
            if one.size() == nbytes:
                _swap(storage, one)
                return True
    return False


def _is_kept(tensor: torch.Tensor, nbytes: int) -> bool:
    """Tell whether so much memory is kept when it is freed; with poison it is whatever its size."""
    return nbytes >= (_BIG_NBYTES if _poison is None else 1) and _is_of_host(tensor)


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Tell whether its memory is the host's; that of a fake tensor is not, whatever it says."""
    return tensor.is_cpu and type(tensor) is torch.Tensor


def allocate(tensor: torch.Tensor) -> None:
    """Have the memory of a tensor that fills its storage, which may be empty."""
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
    """Free the memory of a tensor and of all its views, which stay.

    Memory that an array of NumPy shares cannot be freed; there is a warning, and it stays.

    Returns:
        Whether it is free.
    """
    storage = tensor.untyped_storage()
    if not storage.resizable():
        warnings.warn(
            "Expected to free memory of unsharded parameters, got some that an array shares, as "
            "that of weight.detach().numpy() does; it stays allocated, and the next gather "
            "overwrites it; keep a copy, such as weight.detach().clone().numpy()",
            stacklevel=2,
        )
        return False
    if _poison is not None:
        _poison.sweep()
        fill(storage, tensor.dtype)
    spare = _spare
    if spare is None or not _is_kept(tensor, storage.size()):
        storage.resize_(0)
        return True
    freed = torch.UntypedStorage(0, device="cpu")
    _swap(freed, storage)
    spare.append(freed)
    return True


def memory_ops(tensor: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return builtins that allocate and free the memory of a tensor which fills its storage.

    For what is not :func:`is_big`, and shared by no array.
    """
    storage = tensor.untyped_storage()
    return partial(storage.resize_, tensor.nbytes), partial(storage.resize_, 0)


def storage_number(tensor: torch.Tensor) -> int:
    """Return what is the same for all tensors in one memory, and for no others."""
    return int(tensor.untyped_storage()._cdata)


_storage_of, _number_of = torch.Tensor.untyped_storage, attrgetter("_cdata")


def storage_numbers(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return those of several tensors."""
    return list(map(_number_of, map(_storage_of, tensors)))


def num_uses(tensor: torch.Tensor) -> int:
    """Count who refers to the memory of a tensor: all its views, wherever they are held."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Return the live and the reserved bytes of the caching allocator of an accelerator.

    The public functions also put all other figures into one flat dict, which takes longer.
    """
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0, 0
    stats = torch._C._accelerator_getDeviceStats(device.index)
    live, reserved = (
        stats[f"{kind}_bytes"]["all"]["current"] for kind in ("allocated", "reserved")
    )
    return live, reserved
