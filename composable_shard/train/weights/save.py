"""Writing the full tensors of a sharded model to safetensors files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from composable_shard.errors import ShardError
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Entry, contents_of
from composable_shard.train.weights.matching import RENAMED, Rename, listed
from composable_shard.train.weights.progress import Progress
from composable_shard.train.weights.writing import Output, Planned, Writing, plan_files

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
        ranks.agree([f"'{one.name}' of '{one.entry.names[0]}'" for one in planned], None, RENAMED)
    files = plan_files(planned, None if output.is_file else limit)
    writing = Writing(output, files, ranks)
    with Progress(f"saving {output.name}", writing.nbytes, shown=shows) as bar:
        writing.run(bar)


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
    failure: str | None = None
    if ranks.is_first:
        try:
            output.check(shows=shows)
        except Exception as error:  # noqa: BLE001 (whatever it is, all ranks shall hear of it)
            failure = f"{type(error).__name__}: {error}"
    said = ranks.agree([entry.fact() for entry in entries], failure, "model")
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
