"""Safetensors files: their contents, reading ranges, writing, and the progress bar."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composable_shard.train.full import Box

# Reading safetensors files: their tensors, and ranges of them -------------------------------------


def library(module: str) -> Any:
    """Import a module of an optional library.

    Raises:
        ImportError: If it is not installed; the text says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Expected {module.split('.')[0]} to be installed, got: {error}; "
            "pip install 'composable_shard[weights]'"
        ) from error


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAPPED_NBYTES = 8 * 2**20  # of a file, to read until it is opened anew


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def fact(self) -> str:
        """Describe it, without its place on this machine."""
        return f"'{self.name}' in {self.file.name} of shape {list(self.shape)}, {self.dtype}"


def list_stored(source: str | os.PathLike[str]) -> list[Stored]:
    """List the tensors of a checkpoint.

    Args:
        source: A file, a folder with one file or with an index of several, or such an index.

    Raises:
        FileNotFoundError: If there is no checkpoint, or a folder has several.
        ValueError: If files and index do not match.
    """
    place = Path(source)
    if place.is_dir():
        # A file with a number at the end of its name is a part that only an index makes whole.
        patterns = SINGLE, INDEX, "*.safetensors.index.json", "*[!0-9].safetensors"
        found = next(filter(None, (sorted(place.glob(pattern)) for pattern in patterns)), [])
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise FileNotFoundError(
                f"Expected {SINGLE} or {INDEX} in '{place}', got {names}; pass the path of a file"
            )
        place = found[0]
    return _by_index(place) if place.suffix == ".json" else _in_file(place)


def _by_index(index: Path) -> list[Stored]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"Expected an index with a weight_map in '{index}', got {type(error).__name__}: {error}"
        ) from error
    inside = {file: {item.name: item for item in _in_file(index.parent / file)} for file in files}
    for name, file in weight_map.items():
        if name not in inside[file]:
            raise ValueError(
                f"Expected '{name}' in {file}, as {index.name} says, got none; copy all files anew"
            )
    return [inside[file][name] for name, file in weight_map.items()]


def _in_file(place: Path) -> list[Stored]:
    with _opened(place) as file:
        names = file.keys()
        views = {name: file.get_tensor(name) for name in names}  # mapped: nothing is read
    return [Stored(name, place, tuple(view.shape), view.dtype) for name, view in views.items()]


def _opened(place: Path) -> Any:
    """Open a file; the result is a context manager that closes it."""
    if not place.exists():
        raise FileNotFoundError(f"Expected a file at '{place}', got none")
    safetensors = library("safetensors")
    try:
        return safetensors.safe_open(place, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"Expected a whole safetensors file at '{place}', got: {error}") from error


class Reader(contextlib.ExitStack):
    """Reads ranges of tensors; keeps the last file open, because the next range may be in it.

    Pages that were read count as used memory while their file is mapped, so it is opened anew after
    every ``MAPPED_NBYTES``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._place: Path | None = None
        self._file: Any = None
        self._nbytes = 0  # of the open file that may have been read

    def read(self, stored: Stored, box: Box) -> torch.Tensor:
        """Return a range of a tensor: a view of the mapped file, to be copied at once."""
        if self._place != stored.file or self._nbytes + stored.nbytes > MAPPED_NBYTES:
            self.close()
            self._file = self.enter_context(_opened(stored.file))
            self._place, self._nbytes = stored.file, 0
        self._nbytes += stored.nbytes
        return self._file.get_slice(stored.name)[box] if box else self._file.get_tensor(stored.name)


# Writing a safetensors file tensor by tensor, in any order ----------------------------------------

_LENGTH_NBYTES = 8  # of the header, in front of it


Shaped = tuple[torch.dtype, Sequence[int]]  # of a tensor


class FileWriter:
    """Writes tensors to their places in a file, bitwise equal to a file of ``save_file``.

    Args:
        place: The file to create.
        tensors: The dtypes and shapes of all tensors of the file, by name.

    Raises:
        OSError: Here and in all methods, if the file cannot be written.
    """

    def __init__(self, place: Path, tensors: Mapping[str, Shaped]) -> None:
        header, self._starts = _header(tensors)
        self._file = place.open("wb")
        self._file.write(header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of a tensor, which is contiguous and on the CPU."""
        self._file.seek(self._starts[name])
        if tensor.nbytes:
            self._file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))

    def close(self) -> None:
        """Flush the tensors to the disk, and close the file."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def _header(tensors: Mapping[str, Shaped]) -> tuple[bytes, dict[str, int]]:
    """Return the header, and the offset of each tensor's values.

    The library itself determines the names of dtypes and the order of tensors: it serializes empty
    tensors with the same names and dtypes.
    """
    empty = {name: torch.empty(0, dtype=dtype) for name, (dtype, _) in tensors.items()}
    sample = library("safetensors.torch").save(empty, metadata={"format": "pt"})
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


# The progress bar of reading and writing weights --------------------------------------------------


Advance = Callable[[int], object]  # called with a number of bytes


@contextlib.contextmanager
def progress_bar(title: str, num_bytes: int, *, shown: bool) -> Iterator[Advance]:
    """Show a bar of bytes on the terminal if ``shown``; yield a function that adds bytes."""
    if not shown:
        yield lambda num_bytes: None
        return
    kind = library("tqdm").tqdm
    with kind(desc=title, total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
