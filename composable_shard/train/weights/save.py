"""Writing the full tensors of a sharded model to safetensors files, named when complete."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
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
from composable_shard.train.checkpoint import sync_folder, write_json
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Rename, contents_of
from composable_shard.train.weights.files import (
    INDEX,
    SHARD,
    SINGLE,
    FileWriter,
    library,
    progress_bar,
)
from composable_shard.train.weights.gathering import Bucket, Planned, Route, runs_within, stream
from composable_shard.train.weights.stream import agree_on_plan, plan

# Files of full tensors: planned beforehand, filled tensor by tensor, named when complete ----------

BUCKET_NBYTES = 32 * 2**20
"""Bytes of full tensors that are gathered at once for each rank that writes."""

CPU = torch.device("cpu")

Files = dict[str, list[Planned]]
"""The tensors in each file, by its name; the same on all ranks."""


class Output:
    """The place of the weights: a file, or a folder.

    Args:
        place: Its path; a file if it ends so.
        overwrite: Whether weights that are there may be replaced.
    """

    def __init__(self, place: Path, *, overwrite: bool) -> None:
        self.place = place
        self.is_file = place.suffix == ".safetensors"
        self.folder = place.parent if self.is_file else place
        self._overwrite = overwrite

    def make(self) -> None:
        """Make the folder, on one rank.

        Raises:
            FileExistsError: If there are weights that may not be replaced.
        """
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
        """Return the path of a file before it has its name."""
        return self.folder / f".{name}.part"

    def publish(self, files: Files) -> None:
        """Give all files their names: the one by which they are found comes last.

        If an old index lists files that are replaced, it is removed before: for a moment there is
        no checkpoint, but never one that is mixed.
        """
        names = [*files]
        if len(names) > 1:
            homes = {one.name: name for name, inside in files.items() for one in inside}
            nbytes = sum(one.nbytes for inside in files.values() for one in inside)
            index = {"metadata": {"total_size": nbytes}, "weight_map": homes}
            write_json(self.part(INDEX), index)
            names.append(INDEX)
        stale = [path for path in self._old() if path.name not in names]
        if INDEX in names:
            (self.folder / INDEX).unlink(missing_ok=True)
        for name in names:
            os.replace(self.part(name), self.folder / name)
        sync_folder(self.folder)
        for path in stale:
            path.unlink(missing_ok=True)
        sync_folder(self.folder)

    def discard(self, names: Iterable[str]) -> None:
        """Remove all files without names that this rank sees, as other ranks may have ended."""
        for name in (*names, INDEX):
            with contextlib.suppress(OSError):
                self.part(name).unlink(missing_ok=True)

    def _old(self) -> list[Path]:
        if self.is_file or not self.folder.is_dir():
            return [self.place] if self.is_file and self.place.exists() else []
        return [
            path
            for path in sorted(self.folder.iterdir())
            if path.name in (SINGLE, INDEX) or SHARD.fullmatch(path.name)
        ]


def _save(output: Output, files: Files, ranks: Ranks, advance: Callable[[int], object]) -> None:
    """Write all files, then name them; leave none if something goes wrong.

    Raises:
        ShardError: On all ranks, if one cannot write.

    Collective: those of :func:`_writers` and of ``stream``; two small objects at the end.
    """
    expected = f"to save '{output.place}'"
    rounds = _rounds([*files.values()], _writers(ranks, output, len(files)))
    homes = {one: name for name, inside in files.items() for one in inside}
    under_way: dict[str, FileWriter] = {}

    def begin(name: str) -> FileWriter:
        shapes = {one.name: (one.dtype, one.entry.tensor.shape) for one in files[name]}
        return FileWriter(output.part(name), shapes)

    def write(one: Planned, full: torch.Tensor) -> None:
        name = homes[one]
        if name not in under_way:
            under_way[name] = begin(name)
        under_way[name].write(one.name, full)
        if under_way[name].is_complete:
            under_way.pop(name).close()

    try:
        with contextlib.closing(stream(rounds, ranks, expected, CPU, advance)) as arriving:
            for one, full in arriving:
                if ranks.failure is None:
                    with ranks.noting_failure():
                        write(one, full)
                del one, full  # or they would be held while the next bucket is finished
        if not homes:  # a model without tensors
            ranks.on_first(lambda: begin(*files).close(), expected)
        ranks.agree([], "", expected)
        ranks.on_first(lambda: output.publish(files), expected)
    except BaseException:
        for writer in under_way.values():
            with contextlib.suppress(OSError):
                writer.close()
        output.discard(files)
        raise


def _rounds(files: Sequence[Sequence[Planned]], writers: Sequence[int]) -> list[list[Bucket]]:
    """Let each writer get a bucket at a time, of the file that it is at."""
    routes, rounds, count = cache(Route), list[list[Bucket]](), len(writers)
    for start in range(0, len(files), count):
        wave = [runs_within(file, BUCKET_NBYTES) for file in files[start : start + count]]
        for runs in zip_longest(*wave, fillvalue=()):
            pairs = zip(writers, runs, strict=False)
            rounds.append([Bucket(run, routes, to) for to, run in pairs if run])
    return rounds


def _writers(ranks: Ranks, output: Output, num_files: int) -> list[int]:
    """Return the ranks that write: the first, and for several files those that see its folder.

    Collective: a broadcast and an all-gather of a small object, for several files.
    """
    if num_files == 1 or len(ranks.numbers) == 1:
        return ranks.numbers[:1]
    token = output.folder / ranks.from_one(f".{output.place.name}.{uuid4().hex}")
    with contextlib.suppress(OSError):  # then nobody sees it, and the first rank says what is wrong
        if ranks.is_first:
            token.touch()
    ranks.say(0)
    writes = ranks.is_first
    with contextlib.suppress(ImportError):
        writes = writes or (library("safetensors") is not None and token.exists())
    heard = ranks.gather(writes)
    if ranks.is_first:
        with contextlib.suppress(OSError):
            token.unlink(missing_ok=True)
    return [rank for rank, does in zip(ranks.numbers, heard, strict=True) if does]


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
            library("safetensors")
            if shows:
                library("tqdm")
            output.make()
    place = "a file" if output.is_file else f"a folder, max_shard_size {limit}"
    facts = [f"{place}, {'no ' if rename is None else ''}rename, dtype {dtype}"]
    naming = partial(plan, dtype=dtype, rename=rename, subclasses=torch.Tensor.dequantize)
    expected = f"to save '{output.place}'"
    planned = agree_on_plan(naming, entries, facts, ranks, "save_full()", expected)
    runs = runs_within(planned, math.inf if output.is_file else limit)
    files = dict(zip(output.file_names(len(runs)), runs, strict=True))
    num_bytes_in_all = sum(one.nbytes for one in planned)
    with progress_bar(f"saving {output.place.name}", num_bytes_in_all, shown=shows) as advance:
        _save(output, files, ranks, advance)


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
