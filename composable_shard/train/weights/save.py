"""Writing the full tensors of a sharded model to safetensors files, renamed when complete."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, zip_longest
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import arguments
from composable_shard.train.checkpoint import sync_folder, write_json
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Rename, contents_of
from composable_shard.train.weights.files import INDEX, SINGLE, FileWriter, library, progress_bar
from composable_shard.train.weights.gathering import Bucket, Planned, arrives, runs_within, stream
from composable_shard.train.weights.stream import agree_on_plan

# Files of full tensors: planned, filled tensor by tensor, and renamed when complete ---------------

BUCKET_NBYTES = 32 * 2**20  # gathered at once for each rank that writes

Files = dict[str, list[Planned]]  # the tensors in each file, by its name


class Output:
    """The place of the weights: a file, or a folder.

    Args:
        place: Its path; a file if it ends with ``.safetensors``.
        overwrite: Whether existing weights may be replaced.
    """

    def __init__(self, place: Path, *, overwrite: bool) -> None:
        self.place = place
        self.is_file = place.suffix == ".safetensors"
        self.folder = place.parent if self.is_file else place
        self._overwrite = overwrite

    def make(self) -> None:
        """Make the folder, on one rank.

        Raises:
            FileExistsError: If weights exist that may not be replaced.
        """
        old = self._old()
        if old and not self._overwrite:
            raise FileExistsError(f"'{old[0]}' exists; choose another place, or set overwrite=True")
        self.folder.mkdir(parents=True, exist_ok=True)

    def file_names(self, num_files: int) -> list[str]:
        """Return the names of the files, in their order."""
        if self.is_file or num_files == 1:
            return [self.place.name if self.is_file else SINGLE]
        return [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]

    def part(self, name: str) -> Path:
        """Return the temporary path of a file."""
        return self.folder / f".{name}.part"

    def publish(self, files: Files) -> None:
        """Rename all files to their final names; the file by which readers find them comes last.

        If an old index lists files that are replaced, it is removed first: for a moment there is no
        checkpoint, but never a mixed one.
        """
        names = [*files]
        if len(names) > 1:
            homes = {item.name: name for name, inside in files.items() for item in inside}
            nbytes = sum(item.nbytes for inside in files.values() for item in inside)
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
        """Remove all temporary files that this rank sees, as other ranks may have ended."""
        for name in (*names, INDEX):
            with contextlib.suppress(OSError):
                self.part(name).unlink(missing_ok=True)

    def _old(self) -> list[Path]:
        if self.is_file:
            return [self.place] if self.place.exists() else []
        names = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))
        return [path for path in sorted(self.folder.glob("*")) if names.fullmatch(path.name)]


def _save(output: Output, files: Files, ranks: Ranks, advance: Callable[[int], object]) -> None:
    """Write all files, then rename them; remove all of them after a failure.

    Raises:
        ShardError: On all ranks, if a rank cannot write.

    Collective: those of :func:`_writers` and of ``stream``; two small objects at the end.
    """
    to = _writers(ranks, output, len(files))
    homes = {item.name: name for name, inside in files.items() for item in inside}
    writers, open_files = dict[str, FileWriter](), contextlib.ExitStack()
    try:
        with ranks.noting_failure():
            for (name, inside), rank in zip(files.items(), cycle(to), strict=False):
                if arrives(rank):
                    shapes = {item.name: (item.dtype, item.entry.tensor.shape) for item in inside}
                    writers[name] = FileWriter(output.part(name), shapes)
                    open_files.callback(writers[name].close)
        arriving = stream(_buckets([*files.values()], to), ranks, torch.device("cpu"), advance)
        with contextlib.closing(arriving):
            for item, full in arriving:
                if ranks.failure is None:
                    with ranks.noting_failure():
                        writers[homes[item.name]].write(item.name, full)
                del item, full  # otherwise they stay alive while the next bucket is finished
        with ranks.noting_failure():
            open_files.close()
        ranks.agree()
        ranks.on_first(lambda: output.publish(files))
    except BaseException:
        with contextlib.suppress(OSError):
            open_files.close()
        output.discard(files)
        raise


def _buckets(files: Sequence[Sequence[Planned]], writers: Sequence[int]) -> list[Bucket]:
    """Cut files into buckets; each has a part of the current file of each writer."""
    buckets, count = list[Bucket](), len(writers)
    for start in range(0, len(files), count):
        wave = [runs_within(file, BUCKET_NBYTES) for file in files[start : start + count]]
        for runs in zip_longest(*wave, fillvalue=()):
            pairs = zip(writers, runs, strict=False)
            buckets.append(Bucket(replace(item, to=to) for to, run in pairs for item in run))
    return buckets


def _writers(ranks: Ranks, output: Output, num_files: int) -> list[int]:
    """Return the ranks that write: the first, and for several files all that see its folder.

    Collective: a broadcast and an all-gather of a small object, for several files.
    """
    if num_files == 1 or len(ranks.numbers) == 1:
        return ranks.numbers[:1]
    token = output.folder / ranks.from_one(f".{output.place.name}.{uuid4().hex}")
    with contextlib.suppress(OSError):  # no rank sees it then, and the first rank reports the error
        if ranks.is_first:
            token.touch()
    ranks.say(0)
    writes = ranks.gather(ranks.is_first or token.exists())
    if ranks.is_first:
        with contextlib.suppress(OSError):
            token.unlink(missing_ok=True)
    return [rank for rank, does in writes.items() if does]


# Writing the full tensors of a sharded model to safetensors files ---------------------------------


def save_full(
    model: nn.Module,
    target: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the full parameters and persistent buffers of a sharded model as safetensors.

    They are gathered bucket by bucket. The first rank writes a single file; several files are
    written in parallel by the ranks that see the folder of the first rank. A checkpoint gets its
    name when it is complete. Any program for safetensors files can read it, such as
    :func:`load_sharded`. Needs the extra ``weights``.

    Args:
        model: The model, sharded or not, the same on all ranks. A tied tensor is written once,
            under its first name.
        target: A ``.safetensors`` file; or a folder, created if absent, for ``model.safetensors``,
            or for several files and ``model.safetensors.index.json``.
        max_shard_size: The most bytes of a file in a folder: a number, or a text such as
            ``"500MB"`` or ``"2GiB"``. A larger tensor gets its own file.
        rename: Maps a name in the model to a name in the files, or to ``None`` to leave it out.
        dtype: The dtype to cast floating-point tensors to; their own if absent.
        overwrite: Whether existing weights of that name may be replaced.
        progress: Whether the first rank shows a progress bar, in bytes.
        process_group: The ranks that hold this model; all of them if absent.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``max_shard_size`` is not positive, or a text of another form; if a flag is
            no bool, or ``dtype`` is not a floating-point dtype.
        ShardError: On all ranks: if an argument is wrong on some ranks; if weights exist already,
            if a tensor is on the meta device or is a tensor subclass of several tensors, if
            ``rename`` fails or gives two tensors one name, if a rank cannot write, or the first
            rank lacks a library for it. In a forward or backward.
        RankMismatchError: On all ranks, if models, arguments or results of ``rename`` differ.
        CommunicationError: If a rank has ended or does not answer within the time-out.

    Collective: for each bucket, of 32 MiB or of a larger tensor, a gather to the rank that writes
        it, and 8 bytes to all; a few small objects before and after.
    Memory: two buckets on a rank that writes, or twice the largest tensor; on each rank its own
        parts of the buckets in flight, one for each rank that writes.

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
        arguments.check_path("target", target)
        limit = num_bytes(max_shard_size)
        arguments.check_function("rename", rename)
        arguments.check_dtype("dtype", dtype)
        arguments.check_flags(overwrite=overwrite, progress=progress)
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
    chosen = {"dtype": dtype, "rename": rename, "subclasses": torch.Tensor.dequantize}
    planned = agree_on_plan(entries, facts, ranks, "save_full()", **chosen)
    runs = runs_within(planned, math.inf if output.is_file else limit)
    files = dict(zip(output.file_names(len(runs)), runs, strict=True))
    num_bytes_in_all = sum(item.nbytes for item in planned)
    with progress_bar(f"saving {output.place.name}", num_bytes_in_all, shown=shows) as advance:
        _save(output, files, ranks, advance)


def num_bytes(asked: int | str) -> int:
    """Parse a number of bytes, given as a number or as a text with a unit.

    Raises:
        ValueError: If it is neither, or not positive.

    Example:
        >>> num_bytes("2GiB"), num_bytes("500MB"), num_bytes(7)
        (2147483648, 500000000, 7)
    """
    number = 0.0
    text = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT])(i?)B", str(asked))
    if text is not None:
        number = float(text[1]) * (1024 if text[3] else 1000) ** (1 + "KMGT".index(text[2]))
    elif isinstance(asked, (int, float)) and not isinstance(asked, bool):
        number = asked
    fits = "to be a positive number of bytes or a text such as '5GB'"
    arguments.check_value("max_shard_size", asked, 1 <= number < math.inf, fits)
    return int(number)
