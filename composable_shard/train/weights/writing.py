"""Files of full tensors: planned beforehand, filled tensor by tensor, named when complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.errors import ShardError
from composable_shard.train.checkpoint import sync_folder
from composable_shard.train.extras import library
from composable_shard.train.full_values import full_copy
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Entry
from composable_shard.train.weights.files import EXTRA, INDEX, SHARD, SINGLE
from composable_shard.train.weights.progress import Progress

METADATA = {"format": "pt"}


class Planned(NamedTuple):
    """A tensor that is to be written: under which name and in what dtype."""

    name: str
    entry: Entry
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes it has in the file."""
        return self.entry.tensor.numel() * self.dtype.itemsize


def plan_files(planned: Sequence[Planned], limit: int | None) -> list[list[Planned]]:
    """Spread tensors over files of at most ``limit`` bytes, in their order.

    Args:
        planned: The tensors.
        limit: Bytes of tensors in a file, but for one that has a larger one alone; ``None`` for a
            single file.
    """
    files: list[list[Planned]] = [[]]
    nbytes = 0
    for one in planned:
        if limit is not None and files[-1] and nbytes + one.nbytes > limit:
            files.append([])
            nbytes = 0
        files[-1].append(one)
        nbytes += one.nbytes
    return files


class Output:
    """Where weights go: a file, or a folder.

    Args:
        place: Its path; a file if it ends so.
        overwrite: Whether what is there may be replaced.
    """

    def __init__(self, place: Path, *, overwrite: bool) -> None:
        self.place = place
        self.is_file = place.suffix == ".safetensors"
        self.folder = place.parent if self.is_file else place
        self._overwrite = overwrite

    @property
    def name(self) -> str:
        """Its last part."""
        return self.place.name

    def check(self, *, shows: bool) -> None:
        """Make the folder, and see that weights can be written there (on one rank).

        Raises:
            FileExistsError: If there are some, and they may not be replaced.
            ImportError: If a library is missing that this needs.
        """
        library("safetensors", EXTRA)
        if shows:
            library("tqdm", EXTRA)
        old = self._old()
        if old and not self._overwrite:
            raise FileExistsError(
                f"'{old[0]}' is there already; choose another place, or set overwrite=True"
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def file_names(self, num_files: int) -> list[str]:
        """Return the names of the files, in their order."""
        if self.is_file or num_files == 1:
            return [self.place.name if self.is_file else SINGLE]
        return [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]

    def part(self, name: str) -> Path:
        """Return where a file is written before it has its name."""
        return self.folder / f".{name}.part"

    def publish(self, names: Sequence[str]) -> None:
        """Give all files their names: the one by which they are found comes last.

        Where an old index lists files that are replaced, it goes before them: for a moment there is
        no checkpoint, but never one that is mixed.
        """
        stale = [path for path in self._old() if path.name not in names]
        if INDEX in names:
            (self.folder / INDEX).unlink(missing_ok=True)
        for name in names:
            os.replace(self.part(name), self.folder / name)
        sync_folder(self.folder)
        for path in stale:
            path.unlink(missing_ok=True)
        sync_folder(self.folder)

    def _old(self) -> list[Path]:
        if self.is_file or not self.folder.is_dir():
            return [self.place] if self.is_file and self.place.exists() else []
        return [
            path
            for path in sorted(self.folder.iterdir())
            if path.name in (SINGLE, INDEX) or SHARD.fullmatch(path.name)
        ]


class Writing:
    """Gathers and writes what was planned.

    Args:
        output: Where to.
        files: What is in each file; the same on all ranks.
        ranks: The ranks that gather, of which the first one writes.

    Attributes:
        nbytes: How many bytes the tensors have.
        failure: What went wrong first on this rank, if anything.
    """

    def __init__(self, output: Output, files: Sequence[Sequence[Planned]], ranks: Ranks) -> None:
        self._output, self._files, self._ranks = output, files, ranks
        self._names = output.file_names(len(files))
        self.nbytes = sum(one.nbytes for file in files for one in file)
        self.failure: str | None = None

    def run(self, bar: Progress) -> None:
        """Write all files, then name them.

        Raises:
            ShardError: On all ranks, if the first one cannot write.

        Collective: an all-gather of each DTensor; a small object after each file.
        """
        for name, file in zip(self._names, self._files, strict=True):
            tensors = self._gathered(file, bar)
            self._try_on_first(partial(self._write, name, tensors))
            del tensors
            self._agree()
        self._try_on_first(self._publish)
        self._agree()

    def _gathered(self, file: Sequence[Planned], bar: Progress) -> dict[str, torch.Tensor]:
        """Return the full tensors of a file, on the first rank."""
        tensors: dict[str, torch.Tensor] = {}
        for one in file:
            tensor = one.entry.tensor
            if isinstance(tensor, DTensor) or self._ranks.is_first:
                with self._ranks.naming_failures():
                    (full,) = _torch.leaves(full_copy(tensor))
                if self._ranks.is_first:
                    tensors[one.name] = full.to("cpu", one.dtype).contiguous()
                del full  # or it would be held while the next one is gathered
            bar.advance(one.nbytes)
        return tensors

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        part = self._output.part(name)
        library("safetensors.torch", EXTRA).save_file(tensors, part, metadata=METADATA)
        _sync(part)

    def _publish(self) -> None:
        names = list(self._names)
        if len(names) > 1:
            part = self._output.part(INDEX)
            part.write_text(json.dumps(self._index(), indent=2, sort_keys=True) + "\n")
            _sync(part)
            names.append(INDEX)
        self._output.publish(names)

    def _index(self) -> dict[str, dict[str, int] | dict[str, str]]:
        homes = zip(self._names, self._files, strict=True)
        weight_map = {one.name: name for name, file in homes for one in file}
        return {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}

    def _agree(self) -> None:
        said = self._ranks.agree([], self.failure, "files")
        if said is None:
            return
        if self._ranks.is_first:
            for name in (*self._names, INDEX):
                self._output.part(name).unlink(missing_ok=True)
        raise ShardError(f"Expected to save '{self._output.place}', got {said}")

    def _try_on_first(self, act: Callable[[], None]) -> None:
        """Do something on the first rank; keep what goes wrong for all ranks to hear of it."""
        if self._ranks.is_first and self.failure is None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 (whatever it is)
                self.failure = f"{type(error).__name__}: {error}"


def _sync(file: Path) -> None:
    """Put a file on the disk, so that it does not get its name before its content."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
