"""Writing the full tensors of a sharded model to safetensors files, named when complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.errors import ShardError
from composable_shard.train.checkpoint import sync_folder
from composable_shard.train.ranks import Ranks
from composable_shard.train.unsharded import full_copy
from composable_shard.train.weights.entries import RENAMED, Entry, Rename, contents_of, listed
from composable_shard.train.weights.files import INDEX, SHARD, SINGLE, library, progress_bar

# Files of full tensors: planned beforehand, filled tensor by tensor, named when complete ----------

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
        library("safetensors")
        if shows:
            library("tqdm")
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
    """

    def __init__(self, output: Output, files: Sequence[Sequence[Planned]], ranks: Ranks) -> None:
        self._output, self._files, self._ranks = output, files, ranks
        self._names = output.file_names(len(files))
        self.nbytes = sum(one.nbytes for file in files for one in file)

    def run(self, advance: Callable[[int], object]) -> None:
        """Write all files, then name them.

        Raises:
            ShardError: On all ranks, if the first one cannot write.

        Collective: an all-gather of each DTensor; a small object after each file.
        """
        for name, file in zip(self._names, self._files, strict=True):
            tensors = self._gathered(file, advance)
            self._on_first(partial(self._write, name, tensors))
            del tensors
            self._agree()
        self._on_first(self._publish)
        self._agree()

    def _gathered(
        self, file: Sequence[Planned], advance: Callable[[int], object]
    ) -> dict[str, torch.Tensor]:
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
            advance(one.nbytes)
        return tensors

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        part = self._output.part(name)
        library("safetensors.torch").save_file(tensors, part, metadata=METADATA)
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
        said = self._ranks.agree([], "files")
        if said is None:
            return
        if self._ranks.is_first:
            for name in (*self._names, INDEX):
                self._output.part(name).unlink(missing_ok=True)
        raise ShardError(f"Expected to save '{self._output.place}', got {said}")

    def _on_first(self, act: Callable[[], None]) -> None:
        if self._ranks.is_first:
            with self._ranks.noting_failure():
                act()


def _sync(file: Path) -> None:
    """Put a file on the disk, so that it does not get its name before its content."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


# Writing the full tensors of a sharded model to safetensors files ---------------------------------

DEFAULT_SHARD_SIZE = "5GB"

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def save_full(
    model: nn.Module,
    target: str | os.PathLike[str],
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the full parameters and persistent buffers of a sharded model as safetensors.

    They are gathered one by one, and written by the first rank. A checkpoint has its name only when
    it is complete. Any program reads it that reads safetensors files, :func:`load_sharded` among
    them. Needs the extra ``weights``.

    Args:
        model: The model, sharded or not, the same on all ranks. What is tied in it is written once,
            under its first name.
        target: A ``.safetensors`` file; or else a folder, made if absent, in which goes
            ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        max_shard_size: How many bytes a file in a folder may have: a number, or a text such as
            ``"500MB"`` or ``"2GiB"``. A tensor that is larger has a file of its own.
        rename: Given a name in the model, returns that in the files, or ``None`` to leave it out.
        dtype: What floating-point tensors are cast to; their own if absent.
        overwrite: Whether weights of that name may be there, to be replaced.
        progress: Whether the first rank shows a progress bar, in bytes.
        process_group: The ranks that hold this model; all of them if absent.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``max_shard_size`` is not positive, or is a text of another form.
        ShardError: On all ranks: if there are weights already, if a tensor is on the meta device or
            is a tensor subclass of several tensors, if rename gives two of them one name, if the
            first rank cannot write or lacks a library for it. In a forward or backward.
        RankMismatchError: On all ranks, if their models differ, or what ``rename`` returns.
        CommunicationError: If a rank has ended or does not answer within the time-out.

    Collective: an all-gather of each parameter; a small object before, and after each file.
    Memory: one full tensor on each rank; on the first one those of one file besides, which for a
        single file is the whole model.

    Example:
        >>> import tempfile
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> folder = Path(tempfile.mkdtemp()) / "weights"
        >>> run_threads(lambda: save_full(fully_shard(nn.Linear(2, 4)), folder), 2)
        [None, None]
        >>> [file.name for file in folder.iterdir()]
        ['model.safetensors']
    """
    ranks = Ranks(process_group, f"saving '{target}'")
    limit = num_bytes(max_shard_size)
    entries = contents_of(model, "save_full").entries
    output = Output(Path(target), overwrite=overwrite)
    shows = progress and ranks.is_first
    _agree_on_entries(ranks, entries, output, shows=shows)
    planned = _planned(entries, rename, dtype, output)
    if rename is not None:
        ranks.agree([f"'{one.name}' of '{one.entry.names[0]}'" for one in planned], RENAMED)
    files = plan_files(planned, None if output.is_file else limit)
    writing = Writing(output, files, ranks)
    with progress_bar(f"saving {output.name}", writing.nbytes, shown=shows) as advance:
        writing.run(advance)


def num_bytes(asked: int | str) -> int:
    """Return a number of bytes that is given as a number or as a text with a unit.

    Raises:
        ValueError: If it is neither, or not positive.

    Example:
        >>> num_bytes("2GiB"), num_bytes("500MB"), num_bytes(7)
        (2147483648, 500000000, 7)
    """
    number: float | str = asked
    if isinstance(asked, str):
        unit = next((unit for unit in UNITS if asked.endswith(unit)), None)
        text = asked.removesuffix(unit or "").strip()
        if unit is not None and text.replace(".", "", 1).isdigit():
            number = float(text) * UNITS[unit]
    if isinstance(number, str) or number < 1:
        raise ValueError(
            "Expected max_shard_size to be a positive number of bytes or a text such as '5GB', "
            f"got {asked!r}"
        )
    return int(number)


def _agree_on_entries(ranks: Ranks, entries: list[Entry], output: Output, *, shows: bool) -> None:
    if ranks.is_first:
        with ranks.noting_failure():
            output.check(shows=shows)
    said = ranks.agree([entry.fact() for entry in entries], "model")
    if said is not None:
        raise ShardError(f"Expected to save '{output.place}', got {said}")


def _planned(
    entries: list[Entry], rename: Rename | None, dtype: torch.dtype | None, output: Output
) -> list[Planned]:
    """Name the tensors, and refuse those that cannot be written."""
    planned: dict[str, Planned] = {}
    wrong: list[str] = []
    for entry in entries:
        first = entry.names[0]
        name = first if rename is None else rename(first)
        if name is None:
            continue
        if name in planned:
            other = planned[name].entry.names[0]
            wrong.append(f"'{name}' for both '{other}' and '{first}'")
        elif entry.is_meta:
            wrong.append(f"'{first}' on the meta device")
        elif entry.plain is None:
            kind = type(entry.local).__name__
            wrong.append(f"'{first}', a {kind} of several tensors")
        own = entry.tensor.dtype
        planned[name] = Planned(name, entry, dtype if dtype and own.is_floating_point else own)
    if wrong:
        raise ShardError(
            f"Expected plain tensors with values and names of their own for '{output.place}', "
            f"got {listed(wrong)}"
        )
    return list(planned.values())
