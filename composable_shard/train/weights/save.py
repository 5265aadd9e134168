"""Writing the full tensors of a sharded model to safetensors files, named when complete."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn

from composable_shard.arguments import (
    check_dtype,
    check_flags,
    check_function,
    check_path,
    check_value,
)
from composable_shard.train.checkpoint import sync_folder
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Rename, contents_of, renamed
from composable_shard.train.weights.files import (
    INDEX,
    SHARD,
    SINGLE,
    FileWriter,
    library,
    progress_bar,
)
from composable_shard.train.weights.gathering import Bucket, Planned, Routes, runs_within
from composable_shard.train.weights.stream import Asked, Stream, check_planned

# Files of full tensors: planned beforehand, filled tensor by tensor, named when complete ----------

BUCKET_NBYTES = 32 * 2**20
"""How many bytes of full tensors are gathered at once for each rank that writes."""


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
    """Gathers and writes what was planned: each file by one rank, several files at a time.

    Args:
        output: Where to.
        files: What is in each file; the same on all ranks.
        ranks: The ranks that gather.
        writers: Those that write, by their numbers in the job; the same on all ranks.

    Attributes:
        nbytes: How many bytes the tensors have.
    """

    def __init__(
        self,
        output: Output,
        files: Sequence[Sequence[Planned]],
        ranks: Ranks,
        writers: Sequence[int],
    ) -> None:
        self._output, self._files, self._ranks, self._writers = output, files, ranks, writers
        self._names = output.file_names(len(files))
        self._homes = {one: index for index, file in enumerate(files) for one in file}
        self._open: dict[int, FileWriter] = {}
        self.nbytes = sum(one.nbytes for one in self._homes)

    def run(self, advance: Callable[[int], object]) -> None:
        """Write all files, then name them; leave none if something goes wrong.

        Raises:
            ShardError: On all ranks, if one cannot write.

        Collective: those of a :class:`Stream`; two small objects at the end.
        """
        expected = f"to save '{self._output.place}'"
        stream = Stream(self._rounds(), self._ranks, expected, torch.device("cpu"))
        try:
            with contextlib.closing(stream.run(advance)) as arriving:
                for one, full in arriving:
                    with self._ranks.noting_failure():
                        self._write(one, full)
                    del one, full  # or they would be held while the next bucket is finished
            if self._ranks.is_first and not self._homes:  # a model without tensors
                with self._ranks.noting_failure():
                    self._begin(0).close()
            self._ranks.agree([], "files", expected)
            if self._ranks.is_first:
                with self._ranks.noting_failure():
                    self._publish()
            self._ranks.agree([], "files", expected)
        except BaseException:
            self._discard()
            raise

    def _rounds(self) -> list[list[Bucket]]:
        """Let all who write get a bucket at a time, each of the file that it is at."""
        routes, rounds, count = Routes(), list[list[Bucket]](), len(self._writers)
        for start in range(0, len(self._files), count):
            wave = [runs_within(file, BUCKET_NBYTES) for file in self._files[start : start + count]]
            for runs in zip_longest(*wave, fillvalue=()):
                pairs = zip(self._writers, runs, strict=False)
                rounds.append([Bucket(run, routes, to) for to, run in pairs if run])
        return rounds

    def _write(self, one: Planned, full: torch.Tensor) -> None:
        if self._ranks.failure is not None:
            return
        index = self._homes[one]
        if index not in self._open:
            self._open[index] = self._begin(index)
        self._open[index].write(one.name, full)
        if self._open[index].is_complete:
            self._open.pop(index).close()

    def _begin(self, index: int) -> FileWriter:
        shapes = {one.name: (one.dtype, one.entry.tensor.shape) for one in self._files[index]}
        return FileWriter(self._output.part(self._names[index]), shapes)

    def _publish(self) -> None:
        names = list(self._names)
        if len(names) > 1:
            part = self._output.part(INDEX)
            homes = {one.name: self._names[index] for one, index in self._homes.items()}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": homes}
            part.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            _sync(part)
            names.append(INDEX)
        self._output.publish(names)

    def _discard(self) -> None:
        """Remove what was written; on each rank all that it sees, as others may have ended."""
        for writer in self._open.values():
            with contextlib.suppress(OSError):
                writer.close()
        for name in (*self._names, INDEX):
            with contextlib.suppress(OSError):
                self._output.part(name).unlink(missing_ok=True)


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

    They are gathered bucket by bucket. A single file is written by the first rank, several files at
    the same time, each by one of the ranks that see the folder of the first. A checkpoint has its
    name only when it is complete. Any program reads it that reads safetensors files,
    :func:`load_sharded` among them. Needs the extra ``weights``.

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
        TypeError: If an argument has the wrong type.
        ValueError: If ``max_shard_size`` is not positive, or is a text of another form; if a flag
            is no bool, or ``dtype`` not one of floating point.
        ShardError: On all ranks: if an argument is wrong on some of them; if there are weights
            already, if a tensor is on the meta device or is a tensor subclass of several tensors,
            if rename fails or gives two of them one name, if a rank cannot write, or the first one
            lacks a library for it. In a forward or backward.
        RankMismatchError: On all ranks, if their models or arguments differ, or what ``rename``
            returns.
        CommunicationError: If a rank has ended or does not answer within the time-out.

    Collective: for each bucket, of 32 MiB or of a larger tensor, a gather to the rank that writes
        it, and 8 bytes to all; a few small objects before and after.
    Memory: two buckets on a rank that writes, or twice the largest tensor; on each rank its own
        parts of the buckets that are under way, one for each rank that writes.

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
    with ranks.checking():
        check_path("target", target)
        limit = num_bytes(max_shard_size)
        check_function("rename", rename)
        check_dtype("dtype", dtype)
        check_flags(overwrite=overwrite, progress=progress)
        entries = contents_of(model, "save_full")
    output = Output(Path(target), overwrite=overwrite)
    shows = progress and ranks.is_first
    if ranks.is_first:
        with ranks.noting_failure():
            output.check(shows=shows)
    place = "a file" if output.is_file else f"a folder, max_shard_size {limit}"
    facts = [f"{place}, {'no ' if rename is None else ''}rename, dtype {dtype}"]
    facts += [entry.fact() for entry in entries]
    ranks.agree(facts, "model and arguments of save_full()", f"to save '{output.place}'")
    names = [entry.names[0] for entry in entries]
    expected = f"names from rename for '{output.place}'"
    known = dict(zip(names, renamed(names, rename, ranks, expected), strict=True))
    asked = Asked(dtype, known.get, subclasses=torch.Tensor.dequantize)
    planned = asked.planned(entries)
    check_planned(planned, f"'{output.place}'", "of several tensors")
    files = runs_within(planned, None if output.is_file else limit)
    writing = Writing(output, files, ranks, _writers(ranks, output, len(files)))
    with progress_bar(f"saving {output.name}", writing.nbytes, shown=shows) as advance:
        writing.run(advance)


def _writers(ranks: Ranks, output: Output, num_files: int) -> list[int]:
    """Return the ranks that write: the first, and for several files those that see its folder.

    Collective: a broadcast and an all-gather of a small object, for several files.
    """
    if num_files == 1 or len(ranks.numbers) == 1:
        return ranks.numbers[:1]
    token = ranks.from_first(f".{output.name}.{uuid4().hex}")
    path = output.folder / token
    with contextlib.suppress(OSError):  # then nobody sees it, and the first rank says what is wrong
        if ranks.is_first:
            path.touch()
    ranks.say(0)
    writes = ranks.gather(ranks.is_first or (_can_write() and path.exists()))
    if ranks.is_first:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return [rank for rank, does in zip(ranks.numbers, writes, strict=True) if does]


def _can_write() -> bool:
    try:
        library("safetensors")
    except ImportError:
        return False
    return True


def num_bytes(asked: int | str) -> int:
    """Return a number of bytes that is given as a number or as a text with a unit.

    Raises:
        ValueError: If it is neither, or not positive.

    Example:
        >>> num_bytes("2GiB"), num_bytes("500MB"), num_bytes(7)
        (2147483648, 500000000, 7)
    """
    number = 0.0
    if isinstance(asked, str):
        unit = next((unit for unit in UNITS if asked.endswith(unit)), None)
        text = asked.removesuffix(unit or "").strip()
        if unit is not None and text.replace(".", "", 1).isdecimal():
            number = float(text) * UNITS[unit]
    elif isinstance(asked, (int, float)) and not isinstance(asked, bool):
        number = asked
    fits = "to be a positive number of bytes or a text such as '5GB'"
    check_value("max_shard_size", asked, 1 <= number < math.inf, fits)
    return int(number)
