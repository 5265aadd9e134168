"""Big memory that is about to be written has all of its pages at once."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from composable_shard import _torch

MIB = 1 << 20


def resident(tensor: torch.Tensor) -> float:
    """Return which part of the whole pages of a tensor has memory."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    seen = (ctypes.c_ubyte * num_pages)()
    length = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), length, seen) == 0
    return sum(page & 1 for page in seen) / num_pages


@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2) and madvise(2) are Linux's")
@pytest.mark.parametrize("nbytes", [2 * MIB, 7 * MIB + 12, 33 * MIB])
def test_big_memory_has_all_pages_and_no_less_than_was_asked(nbytes: int) -> None:
    with _torch.poisoned_memory(False):
        tensor = torch.empty(nbytes // 4)
        _torch.free(tensor)
        assert tensor.untyped_storage().size() == 0
        _torch.allocate(tensor)
        assert tensor.untyped_storage().size() == tensor.nbytes == nbytes
        assert resident(tensor) == 1
        tensor.fill_(1.0)
        assert tensor.sum().item() == tensor.numel()


@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2) and madvise(2) are Linux's")
def test_memory_that_nobody_asked_pages_for_has_none_before_it_is_written() -> None:
    assert resident(torch.empty(64 * MIB // 4)) < 0.5
