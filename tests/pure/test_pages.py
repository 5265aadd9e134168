"""Big memory has all of its pages at once, and is kept for what is allocated next in a pass."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from composable_shard import _torch
from composable_shard._torch import memory

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
        assert resident(_torch.with_pages(torch.empty(nbytes // 4))) == 1
        tensor.fill_(1.0)
        assert tensor.sum().item() == tensor.numel()


@pytest.fixture
def keeping() -> Iterator[None]:
    if memory._swap is None:
        pytest.skip("this torch cannot hand memory from one storage to another")
    with _torch.poisoned_memory(False):
        _torch.keep_freed_memory()
        yield
        _torch.return_freed_memory()


def sizes_kept() -> list[int]:
    return [one.nbytes() for one in _torch.memory._spare or ()]


@pytest.mark.usefixtures("keeping")
def test_what_does_not_fit_is_given_back_and_never_are_more_than_two_pieces_kept() -> None:
    tensors = [torch.empty(count * MIB) for count in (1, 2, 3)]
    for tensor in tensors:
        _torch.free(tensor)
    assert sizes_kept() == [8 * MIB, 12 * MIB]
    _torch.allocate(tensors[2])
    assert sizes_kept() == []  # what was freed before what fits is not wanted either
    _torch.free(tensors[2])
    other = torch.empty(5 * MIB)
    other.untyped_storage().resize_(0)
    _torch.allocate(other)
    assert sizes_kept() == [] and other.untyped_storage().size() == 20 * MIB


@pytest.mark.usefixtures("keeping")
def test_small_memory_and_that_of_fake_tensors_is_not_kept() -> None:
    small = torch.empty(MIB // 8)
    with FakeTensorMode():
        fake = torch.empty(3 * MIB)
        _torch.free(fake)
        _torch.allocate(fake)
    _torch.free(small)
    assert sizes_kept() == [] and fake.untyped_storage().size() == 12 * MIB
