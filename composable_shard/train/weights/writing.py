"""A safetensors file that is filled tensor by tensor, in whatever order they come."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from composable_shard.train.weights.files import library

METADATA = {"format": "pt"}

_LENGTH_NBYTES = 8  # of the header, in front of it

Shaped = tuple[torch.dtype, Sequence[int]]
"""What a tensor is before its values are known."""


class FileWriter:
    """Writes tensors to their places in a file, byte for byte what ``save_file`` makes of them.

    Args:
        place: The file, which is made anew.
        tensors: All that will be in it, by name.

    Raises:
        OSError: Here and below, if it cannot be written.
    """

    def __init__(self, place: Path, tensors: Mapping[str, Shaped]) -> None:
        header, self._starts = _header(tensors)
        self._file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._left = set(tensors)
        self._write_at(0, header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of a tensor, which is contiguous and on the CPU."""
        if tensor.nbytes:
            memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            self._write_at(self._starts[name], memory)
        self._left.discard(name)

    @property
    def is_complete(self) -> bool:
        """Whether all tensors have been written."""
        return not self._left

    def close(self) -> None:
        """Put what was written on the disk, and close the file."""
        file, self._file = self._file, -1
        if file >= 0:
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _write_at(self, start: int, content: Any) -> None:
        left = memoryview(content).cast("B")
        while left:
            count = os.pwrite(self._file, left, start)
            left, start = left[count:], start + count


def _header(tensors: Mapping[str, Shaped]) -> tuple[bytes, dict[str, int]]:
    """Return what stands in front of the values, and where those of each tensor begin.

    The library says itself what it calls dtypes and in which order it puts tensors: of tensors
    without elements, of the same names and dtypes.
    """
    empty = {name: torch.empty(0, dtype=dtype) for name, (dtype, _) in tensors.items()}
    sample = library("safetensors.torch").save(empty, metadata=METADATA)
    length = int.from_bytes(sample[:_LENGTH_NBYTES], "little")
    header = json.loads(sample[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
    starts, end = {}, 0
    for name, described in header.items():
        if name in tensors:
            dtype, shape = tensors[name]
            starts[name], end = end, end + torch.Size(shape).numel() * dtype.itemsize
            described |= {"shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_NBYTES)
    front = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    return front, {name: start + len(front) for name, start in starts.items()}
