"""Reading a checkpoint into shards: each rank reads its own rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_function, check_path
from composable_shard.errors import ShardError
from composable_shard.train.full import Box, as_bytes, boxes_of, count_write, same_bits
from composable_shard.train.ranks import Ranks, naming_failures
from composable_shard.train.weights import files
from composable_shard.train.weights.entries import Entry, Rename, contents_of, listed, materialize
from composable_shard.train.weights.files import Advance, Reader, Stored

# The tensors of a checkpoint and of a model -------------------------------------------------------


Matches = dict[Entry, list[Stored]]  # each with the tensors under its names, in order


def _by_name(
    stored: Sequence[Stored], rename: Rename | None, ranks: Ranks, source: object
) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by their names in the model, the same on all ranks.

    Raises:
        ShardError: On all ranks, if ``rename`` fails on a rank, or returns a name twice.
        RankMismatchError: On all ranks, if its results differ between ranks.

    Collective: an all-gather of a small object if there is a ``rename``.
    """
    names: list[str | None] = [item.name for item in stored]
    if rename is not None:
        with ranks.noting_failure():
            names = [rename(item.name) for item in stored]
        facts = [f"{new!r} of {old.name!r}" for old, new in zip(stored, names, strict=True)]
        ranks.agree(*facts, what="names after rename")
    found: dict[str, Stored] = {}
    for item, name in zip(stored, names, strict=True):
        if name in found:
            raise ShardError(
                f"Expected distinct names from rename, got '{name}' for both "
                f"'{found[name].name}' and '{item.name}' in '{source}'"
            )
        if name is not None:
            found[name] = item
    return found


def _match(
    entries: Sequence[Entry], by_name: Mapping[str, Stored], source: object, *, strict: bool
) -> tuple[Matches, list[str], list[str]]:
    """Find the tensors of a checkpoint in a model.

    Returns:
        The tensors on both sides; names of the model that the checkpoint lacks, also under a tied
        name; original names of the checkpoint that the model lacks.

    Raises:
        ShardError: If a tensor does not fit, or, if ``strict``, if a side lacks names of the other.
    """
    found = {e: [by_name[name] for name in e.names if name in by_name] for e in entries}
    matches = {entry: stored for entry, stored in found.items() if stored}
    missing = [entry.names[0] for entry in found if entry not in matches]
    known = {name for entry in entries for name in entry.names}
    unexpected = [item.name for name, item in by_name.items() if name not in known]
    if strict and (missing or unexpected):
        sides = {"missing": missing, "unexpected": unexpected}
        got = "; ".join(f"{side}: {listed(names)}" for side, names in sides.items() if names)
        raise ShardError(
            f"Expected the names of the model in '{source}', got {got}; pass rename or strict=False"
        )
    if wrong := [text for entry, items in matches.items() if (text := _misfit(entry, items))]:
        raise ShardError(f"Expected tensors in '{source}' that fit the model, got {listed(wrong)}")
    return matches, missing, unexpected


def _misfit(entry: Entry, stored: Sequence[Stored]) -> str | None:
    """Return why a tensor cannot be read into the model; ``None`` if it can."""
    name, shape = f"'{entry.names[0]}'", tuple(entry.tensor.shape)
    for item in stored:
        if item.shape != shape and not (shape == () and item.shape == (1,)):
            return f"{name} of shape {list(item.shape)} for {list(shape)}"
        if not torch.can_cast(item.dtype, entry.tensor.dtype):
            return f"{name} of {item.dtype} for {entry.tensor.dtype}"
    if entry.plain is None:
        kind = type(entry.local).__name__
        return f"{name} for a {kind}, which only the code of its class can make from a plain tensor"
    tensor = entry.tensor
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        return f"{name} for {tensor.placements}, which are no parts of a full tensor"
    return None


# Reading the values, tensor by tensor -------------------------------------------------------------


def _read(
    model: nn.Module, matches: Matches, ranks: Ranks, advance: Advance, *, strict: bool, sends: bool
) -> None:
    """Read the values of all tensors.

    A rank that fails records the error, and continues to receive and to send, so that the others do
    not wait for it.

    Args:
        model: The model.
        matches: The tensors, the same on all ranks.
        ranks: The ranks that take part.
        advance: Called with the number of loaded bytes.
        strict: Whether tied names must hold the same values.
        sends: Whether the first rank reads and sends to the others.

    Collective: with ``sends``, a broadcast of each tensor.
    """
    with torch.inference_mode(False), torch.no_grad(), Reader() as reader:
        with ranks.noting_failure():
            materialize(model, matches)
        device = torch.device("cpu")
        if ranks.group is not None:
            device = _torch.device_for(ranks.group, device)
        largest = max((item.nbytes for items in matches.values() for item in items), default=0)
        # A buffer for each tensor would stay with the allocator.
        buffer = _torch.empty(largest if sends else 0, dtype=torch.uint8, device=device)
        for entry in matches:
            count_write(entry.local)  # also if this rank has no rows, or fails
        for entry, items in sorted(matches.items(), key=lambda pair: pair[1][0].file):
            for stored in items:
                rows: Callable[[Box], torch.Tensor] = partial(reader.read, stored)
                if sends:
                    rows = _broadcast(stored, ranks, buffer[: stored.nbytes], reader).__getitem__
                if ranks.failure is None:
                    with ranks.noting_failure():
                        first = items[0] if strict else stored
                        _fill(entry, stored, first, rows)
                advance(stored.nbytes)


def _fill(entry: Entry, stored: Stored, first: Stored, rows: Callable[[Box], torch.Tensor]) -> None:
    """Write this rank's part of a tensor, or compare it if a tied name, ``first``, filled it."""
    plain = entry.plain
    assert plain is not None
    for box, local_box in boxes_of(entry.tensor):
        target = plain[local_box]
        piece = rows(box).reshape(target.shape)
        if stored is first:
            target.copy_(piece)
        elif not same_bits(target, piece.to(target.device, target.dtype)):
            raise ValueError(
                f"Expected tied '{first.name}' and '{stored.name}' to be equal, got unequal values"
            )


def _broadcast(stored: Stored, ranks: Ranks, sent: torch.Tensor, reader: Reader) -> torch.Tensor:
    """Return a full tensor, read by the first rank. Collective: a broadcast of its bytes.

    Args:
        stored: The tensor.
        ranks: The ranks that get it.
        sent: Memory for its bytes.
        reader: Reads it.
    """
    if ranks.is_first and ranks.failure is None and len(sent):
        with ranks.noting_failure():
            sent = as_bytes(reader.read(stored, ())).to(sent.device)
    if ranks.group is not None and len(sent):
        with naming_failures(ranks.doing):
            dist.broadcast(sent, group=ranks.group, group_src=0)
    return sent.view(stored.dtype).view(stored.shape)


# Reading a checkpoint into shards, each rank its own rows -----------------------------------------


class Loaded(NamedTuple):
    """The result of a load: the names that a checkpoint and a model share, and the others.

    Its text is a summary: ``<loaded 12 tensors, nothing missing, nothing unexpected>``.

    Attributes:
        missing_keys: Names of the model that the checkpoint lacks; these tensors keep their values.
        unexpected_keys: Names of the checkpoint that the model lacks.
        left_on_meta: Non-persistent buffers on the meta device, which no checkpoint has.
        num_tensors: The number of parameters and buffers of the model that were loaded.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    left_on_meta: list[str]
    num_tensors: int

    def __repr__(self) -> str:
        parts = [f"loaded {self.num_tensors} tensor{'' if self.num_tensors == 1 else 's'}"]
        for names, what in ((self.missing_keys, "missing"), (self.unexpected_keys, "unexpected")):
            parts.append(f"{what}: {listed(names)}" if names else f"nothing {what}")
        if self.left_on_meta:
            parts.append(f"still on the meta device: {listed(self.left_on_meta)}")
        return f"<{', '.join(parts)}>"


def load_sharded(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    broadcast_from_rank0: bool = False,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Read a safetensors checkpoint of the whole model into its shards.

    Each rank reads only the rows that it holds, tensor by tensor. Parameters and persistent buffers
    are written in place, in their dtype. Tensors on the meta device first get memory on their
    device. Needs the extra ``weights``.

    Args:
        model: The model, sharded or not, the same on all ranks. A tied tensor needs one of its
            names in the checkpoint; if several are there, all must have the same values.
        source: A ``.safetensors`` file, a folder with ``model.safetensors`` or with
            ``model.safetensors.index.json`` and the files that it lists, or such an index.
        strict: Whether names on one side only are an error. If not, they are returned, missing
            tensors keep their values, and the last of several tied names is used.
        rename: Maps a name in the checkpoint to a name in the model, or to ``None`` to skip the
            tensor.
        broadcast_from_rank0: Whether only the first rank reads, and sends each tensor to all; for
            files that the other ranks do not see.
        progress: Whether the first rank shows a progress bar, of the bytes of the checkpoint.
        process_group: The ranks that hold this model; all of them if absent. For example the ranks
            of one pipeline stage, which have a part of the names in the checkpoint.

    Returns:
        The loaded, missing and unexpected names; the same on all ranks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a flag is no bool.
        ShardError: On all ranks, before anything is read: if an argument is wrong on some ranks, if
            a rank cannot open the checkpoint or lacks a library for it, if ``rename`` fails, if
            names or shapes differ, a dtype cannot be cast (floating point into integers), or a
            parameter is a tensor subclass of several tensors. On all ranks, at the end: if a rank
            failed to read, or tied names differ; the model is then partly loaded. In a forward or
            backward.
        RankMismatchError: On all ranks, if models, checkpoints, arguments or results of ``rename``
            differ.
        CommunicationError: If a rank has ended, or did not read within the time-out.

    Collective: two all-gathers of a small object, three with ``rename``; with
        ``broadcast_from_rank0`` a broadcast of each tensor.
    Memory: no more than one tensor at a time besides the model.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from composable_shard import fully_shard, save_full
        >>> from composable_shard.testing import run_threads
        >>> file = os.path.join(tempfile.mkdtemp(), "layer.safetensors")
        >>> save_full(nn.Linear(2, 4), file)
        >>> def load():
        ...     with torch.device("meta"):
        ...         layer = fully_shard(nn.Linear(2, 4))
        ...     return load_sharded(layer, file), layer.weight.to_local().shape
        >>> run_threads(load, 2)[0]
        (<loaded 2 tensors, nothing missing, nothing unexpected>, torch.Size([2, 2]))
    """
    ranks = Ranks(process_group, f"loading '{source}'")
    with ranks.checking():
        check_path("source", source)
        check_flags(strict=strict, broadcast_from_rank0=broadcast_from_rank0, progress=progress)
        check_function("rename", rename)
        found = contents_of(model, "load_sharded", has_volatile=True)
        entries = [entry for entry in found if entry.is_persistent]
    shows, sends = progress and ranks.is_first, broadcast_from_rank0
    arguments = f"strict {strict}, {'no ' if rename is None else ''}rename"
    facts = [f"{arguments}, broadcast_from_rank0 {sends}", *(entry.fact() for entry in entries)]
    stored: list[Stored] = []
    if ranks.is_first or not sends:
        with ranks.noting_failure():
            if shows:
                files.library("tqdm")
            stored = files.list_stored(source)
    facts += [] if sends else [item.fact() for item in stored]
    ranks.agree(*facts, what="model, checkpoint and arguments of load_sharded()")
    if sends:
        stored = ranks.from_one(stored)
    by_name = _by_name(stored, rename, ranks, source)
    matches, missing, unexpected = _match(entries, by_name, source, strict=strict)
    nbytes = sum(item.nbytes for items in matches.values() for item in items)
    with files.progress_bar(f"loading {Path(source).name}", nbytes, shown=shows) as advance:
        _read(model, matches, ranks, advance, strict=strict, sends=sends)
    ranks.agree(remedy="; the model is partly loaded, load it again")
    volatile = [entry for entry in found if not entry.is_persistent and entry.is_meta]
    left_on_meta = [name for entry in volatile for name in entry.names]
    if left_on_meta and ranks.is_first:
        left = f"non-persistent buffers {listed(left_on_meta)} are still on the meta device"
        warnings.warn(f"The {left}; compute them, as no checkpoint has them", stacklevel=2)
    return Loaded(missing, unexpected, left_on_meta, len(matches))
