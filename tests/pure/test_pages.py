"""Big memory has all of its pages at once, and is kept for what is allocated next in a pass."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

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


def mapped(file: int) -> tuple[torch.Tensor, weakref.ref[Callable[[], None]]]:
    """Return a tensor of 12 MiB, and the owner of the file that is mapped to its first 8 MiB."""
    tensor, owner = _torch.empty_mappable(3 * MIB, torch.float32).fill_(1.0), lambda: None
    memory = _torch.mappable_memory(tensor)
    assert memory is not None and tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.map(tensor.data_ptr(), mmap.PAGESIZE, file, 0, owner)  # too small
    assert memory.map(tensor.data_ptr(), 8 * MIB, file, 0, owner)
    assert tensor.sum().item() == 2 * MIB * 2.0 + MIB
    tensor[0] = 5.0
    assert os.pread(file, 4, 0) == struct.pack("f", 2.0)  # a write stays in this process
    return tensor, weakref.ref(owner)


@pytest.fixture
def twos() -> Iterator[int]:
    """A file of 8 MiB with the float 2.0 throughout."""
    if sys.platform != "linux" or memory._swap is None:
        pytest.skip("memory is mapped on Linux, by torches that hand memory to another storage")
    file = os.memfd_create("twos")
    os.write(file, struct.pack("f", 2.0) * 2 * MIB)
    with _torch.poisoned_memory(False):
        yield file
    _torch.unmap_unused()
    os.close(file)


def test_freed_memory_keeps_its_address_and_nothing_else(twos: int) -> None:
    tensor, owner = mapped(twos)
    address = tensor.data_ptr()
    assert _torch.free(tensor) and tensor.untyped_storage().size() == 0 and owner() is None
    _torch.allocate(tensor)
    assert tensor.data_ptr() == address and resident(tensor) < 0.01
    assert tensor.fill_(3.0).sum().item() == 9 * MIB


def test_mapped_memory_is_freed_with_pages_of_its_own(twos: int) -> None:
    tensor, owner = mapped(twos)
    view, storage = tensor[:3], StorageWeakRef(tensor.untyped_storage())
    del tensor
    _torch.unmap_unused()
    assert view.tolist() == [5.0, 2.0, 2.0] and owner() is not None
    del view
    _torch.unmap_unused()
    assert owner() is None and storage.expired()


def test_memory_that_an_array_shares_stays_mapped(twos: int) -> None:
    tensor, owner = mapped(twos)
    array = tensor.numpy()
    with pytest.warns(UserWarning, match="Expected to free memory of unsharded parameters"):
        assert not _torch.free(tensor)
    assert array[:2].tolist() == [5.0, 2.0] and owner() is not None


def test_memory_that_was_moved_to_other_processes_is_left_alone(twos: int) -> None:
    """Torch has freed it by then, so its addresses may belong to somebody else."""
    tensor, owner = mapped(twos)
    tensor.share_memory_()
    assert _torch.mappable_memory(tensor) is None
    with mock.patch.object(memory, "map_memory", side_effect=AssertionError("was unmapped")):
        assert tensor[:2].tolist() == [5.0, 2.0]
        del tensor
        _torch.unmap_unused()
    assert owner() is None


@pytest.mark.usefixtures("twos")
def test_memory_that_is_big_with_its_rest_of_a_page_alone_is_allocated_whole() -> None:
    tensor = _torch.empty_mappable(2 * MIB // 4 - 1, torch.float32)
    allocate, free = _torch.memory_ops(tensor)
    for value in (1.0, 2.0):
        free()
        allocate()
        assert tensor.fill_(value).sum().item() == value * tensor.numel()


def test_memory_of_fake_tensors_is_not_mapped() -> None:
    with FakeTensorMode():
        fake = _torch.empty_mappable(3 * MIB, torch.float32)
        assert _torch.mappable_memory(fake) is None
        _torch.free(fake)
        _torch.allocate(fake)
    assert fake.untyped_storage().size() == 12 * MIB
