"""Reading a checkpoint into shards, each rank its own rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_function, check_path
from composable_shard.errors import ShardError
from composable_shard.train.full import boxes_of, count_write, same_bits
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import (
    Entry,
    Rename,
    contents_of,
    listed,
    materialize,
    registered,
    renamed,
)
from composable_shard.train.weights.files import Reader, Stored, library, list_stored, progress_bar

# Which tensor of a checkpoint goes where in a model, and what does not fit ------------------------


class Match(NamedTuple):
    """A tensor of the model and those of the checkpoint that have its names, in their order."""

    entry: Entry
    stored: tuple[Stored, ...]


def match(
    entries: Sequence[Entry],
    stored: Sequence[Stored],
    names: Sequence[str | None],
    source: str | os.PathLike[str],
) -> tuple[list[Match], list[str], list[str]]:
    """Find the tensors of a checkpoint in a model.

    Args:
        entries: The tensors of the model.
        stored: Those of the checkpoint.
        names: What each of those is called in the model; ``None`` to pass over it.
        source: The checkpoint, for messages.

    Returns:
        What is found on both sides; names of the model that are not in the checkpoint, also not
        under a tied name; names in the checkpoint, as they stand there, that the model lacks.

    Raises:
        ShardError: If two of them would have the same name.
    """
    by_name: dict[str, Stored] = {}
    for one, name in zip(stored, names, strict=True):
        if name in by_name:
            raise ShardError(
                f"Expected names that rename keeps apart, got '{name}' for both "
                f"'{by_name[name].name}' and '{one.name}' in '{source}'"
            )
        if name is not None:
            by_name[name] = one
    found = [
        Match(entry, tuple(by_name[name] for name in entry.names if name in by_name))
        for entry in entries
    ]
    known = {name for entry in entries for name in entry.names}
    return (
        [match for match in found if match.stored],
        [match.entry.names[0] for match in found if not match.stored],
        [one.name for name, one in by_name.items() if name not in known],
    )


def _check_names(missing: Sequence[str], unexpected: Sequence[str], source: object) -> None:
    if missing or unexpected:
        sides = {"missing": missing, "unexpected": unexpected}
        got = "; ".join(f"{side}: {listed(names)}" for side, names in sides.items() if names)
        raise ShardError(
            f"Expected the names of the model in '{source}', got {got}; pass rename to map names, "
            "or strict=False to load what there is"
        )


def _check_values(matches: Sequence[Match], source: object) -> None:
    if wrong := [text for match in matches if (text := _misfit(match))]:
        raise ShardError(f"Expected tensors in '{source}' that fit the model, got {listed(wrong)}")


def _misfit(match: Match) -> str | None:
    """Tell why a tensor cannot be read into the model, if it cannot."""
    entry, shape = match.entry, tuple(match.entry.tensor.shape)
    name = f"'{entry.names[0]}'"
    for one in match.stored:
        if one.shape != shape and not (shape == () and one.shape == (1,)):
            return f"{name} of shape {list(one.shape)} for {list(shape)}"
        if not torch.can_cast(one.dtype, entry.tensor.dtype):
            return f"{name} of {one.dtype} for {entry.tensor.dtype}"
    if entry.plain is None:
        kind = type(entry.local).__name__
        return f"{name} for a {kind}, which only its own code makes from a plain tensor"
    tensor = entry.tensor
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        return f"{name} for {tensor.placements}, which are no parts of a full tensor"
    return None


# The values of a checkpoint on their way into a model, tensor by tensor ---------------------------


class Reading:
    """Reads what was matched.

    A rank that fails goes on to receive and to send, so that the others do not wait for it.

    Args:
        matches: What goes where; the same on all ranks.
        ranks: The ranks that take part.
        strict: Whether tied names must hold the same values.
        sends: Whether the first rank reads and sends to the others.

    Attributes:
        nbytes: How many bytes the tensors have, in the files.
    """

    def __init__(
        self, matches: Sequence[Match], ranks: Ranks, *, strict: bool, sends: bool
    ) -> None:
        files = {stored.file: None for match in matches for stored in match.stored}
        order = {file: place for place, file in enumerate(files)}
        self._matches = sorted(matches, key=lambda match: order[match.stored[0].file])
        self._ranks, self._strict, self._sends = ranks, strict, sends
        self.nbytes = sum(stored.nbytes for match in matches for stored in match.stored)

    def run(self, model: nn.Module, advance: Callable[[int], object]) -> None:
        """Read everything; what goes wrong on this rank is noted.

        Args:
            model: The model that the tensors are in.
            advance: Told how many bytes are done.

        Collective: if it ``sends``, a broadcast of each tensor.
        """
        with torch.inference_mode(False), torch.no_grad(), Reader() as reader:
            with self._ranks.noting_failure():
                materialize(model, [match.entry for match in self._matches])
            if self._sends:  # a buffer for each tensor would stay with the allocator
                largest = max((one.nbytes for m in self._matches for one in m.stored), default=0)
                group, device = self._ranks.group, torch.device("cpu")
                device = device if group is None else _torch.device_for(group, device)
                self._buffer = _torch.empty(largest, dtype=torch.uint8, device=device)
            for match in self._matches:
                count_write(match.entry.local)  # also where this rank has no rows, or fails
            for match in self._matches:
                for stored in match.stored:
                    if self._sends or self._ranks.failure is None:
                        self._read(match, stored, reader)
                        advance(stored.nbytes)

    def _read(self, match: Match, stored: Stored, reader: Reader) -> None:
        full = self._sent(stored, reader) if self._sends else None
        if self._ranks.failure is None:
            with self._ranks.noting_failure():
                self._fill(match, stored, full, reader)

    def _fill(
        self, match: Match, stored: Stored, full: torch.Tensor | None, reader: Reader
    ) -> None:
        """Write this rank's part of a tensor, or compare it if a tied name has filled it."""
        is_again = self._strict and stored is not match.stored[0]
        plain = match.entry.plain
        assert plain is not None
        for box, own in boxes_of(match.entry.tensor):
            target = plain[own]
            piece = reader.read(stored, box) if full is None else full[box]
            piece = piece.reshape(target.shape)
            if not is_again:
                target.copy_(piece)
            elif not same_bits(target, piece.to(target.device, target.dtype)):
                raise ValueError(
                    f"Expected '{match.stored[0].name}' and '{stored.name}', which the model ties, "
                    "to hold the same, got different values"
                )

    def _sent(self, stored: Stored, reader: Reader) -> torch.Tensor:
        """Return a full tensor, read by the first rank. Collective: a broadcast of its bytes."""
        ranks, sent = self._ranks, self._buffer[: stored.nbytes]
        if ranks.is_first and ranks.failure is None and len(sent):
            with ranks.noting_failure():
                full = reader.read(stored, tuple(slice(0, length) for length in stored.shape))
                sent = full.reshape(-1).view(torch.uint8).to(sent.device)
        if ranks.group is not None and len(sent):
            with ranks.naming_failures():
                dist.broadcast(sent, group=ranks.group, group_src=0)
        return sent.view(stored.dtype).view(stored.shape)


# Reading a checkpoint into shards, each rank its own rows -----------------------------------------


class Loaded(NamedTuple):
    """What a checkpoint and a model share, and what they do not.

    Its text says how it went: ``<loaded 12 tensors, nothing missing, nothing unexpected>``.

    Attributes:
        missing_keys: Names of the model that the checkpoint lacks; left as they were.
        unexpected_keys: Names of the checkpoint that the model lacks.
        left_on_meta: Non-persistent buffers on the meta device, which no checkpoint has.
        num_tensors: How many parameters and buffers of the model were loaded.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    left_on_meta: list[str]
    num_tensors: int

    def __repr__(self) -> str:
        said = [f"loaded {self.num_tensors} tensor{'' if self.num_tensors == 1 else 's'}"]
        for names, what in ((self.missing_keys, "missing"), (self.unexpected_keys, "unexpected")):
            said.append(f"{what}: {listed(names)}" if names else f"nothing {what}")
        if self.left_on_meta:
            said.append(f"still on the meta device: {listed(self.left_on_meta)}")
        return f"<{', '.join(said)}>"


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

    Each rank reads the rows that it holds and nothing else, tensor by tensor. Parameters and
    persistent buffers are written in place, in the dtype that they have. Those on the meta device
    get memory first, where they belong. Needs the extra ``weights``.

    Args:
        model: The model, sharded or not, the same on all ranks. What is tied in it needs one of its
            names in the checkpoint; if there are several, all must hold the same.
        source: A ``.safetensors`` file, a folder with ``model.safetensors`` or with
            ``model.safetensors.index.json`` and the files that it lists, or such an index.
        strict: Whether names that only one side has are an error. If not, they are returned, what
            is missing keeps its values, and the last of several tied names counts.
        rename: Given a name in the checkpoint, returns that in the model, or ``None`` to pass over
            the tensor.
        broadcast_from_rank0: Whether the first rank alone reads, and sends each tensor to all; for
            files that the others do not see.
        progress: Whether the first rank shows a progress bar, of the bytes of the checkpoint.
        process_group: The ranks that hold this model; all of them if absent. The ranks of one
            pipeline stage, for example, whose names are a part of those in the checkpoint.

    Returns:
        What was loaded and what was not; on all ranks the same.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a flag is no bool.
        ShardError: On all ranks, before anything is read: if an argument is wrong on some of them,
            if a rank cannot open the checkpoint or
            lacks a library for it, if rename fails, if names or shapes differ, a dtype cannot be
            cast (floating point into integers), or a parameter is a tensor subclass of several
            tensors. On all ranks, at the end: if a rank failed to read, or tied names differ; the
            model is then partly loaded. In a forward or backward.
        RankMismatchError: On all ranks, if their models, checkpoints or arguments differ, or what
            ``rename`` returns.
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
        entries = contents_of(model, "load_sharded")
    shows = progress and ranks.is_first
    arguments = f"strict {strict}, {'no ' if rename is None else ''}rename"
    stored = _agree_on_stored(
        ranks, entries, arguments, source, sends=broadcast_from_rank0, shows=shows
    )
    expected = f"names from rename for '{source}'"
    names = renamed([one.name for one in stored], rename, ranks, expected)
    matches, missing, unexpected = match(entries, stored, names, source)
    if strict:
        _check_names(missing, unexpected, source)
    _check_values(matches, source)
    reading = Reading(matches, ranks, strict=strict, sends=broadcast_from_rank0)
    with progress_bar(f"loading {Path(source).name}", reading.nbytes, shown=shows) as advance:
        reading.run(model, advance)
    partly = "; the model is partly loaded, load it again"
    ranks.agree([], "tensors", f"to load '{source}'", remedy=partly)
    volatile = [(name, one) for name, one, is_persistent in registered(model) if not is_persistent]
    left_on_meta = [name for name, buffer in volatile if buffer.is_meta]
    if left_on_meta and ranks.is_first:
        warnings.warn(
            f"No checkpoint has the non-persistent buffers {listed(left_on_meta)}, which "
            "are still on the meta device; compute them as the constructor of their module does",
            stacklevel=2,
        )
    return Loaded(missing, unexpected, left_on_meta, len(matches))


def _agree_on_stored(
    ranks: Ranks,
    entries: Sequence[Entry],
    arguments: str,
    source: str | os.PathLike[str],
    *,
    sends: bool,
    shows: bool,
) -> list[Stored]:
    """Return the tensors of the checkpoint if all ranks have the same ones, and the same model."""
    stored: list[Stored] = []
    if ranks.is_first or not sends:
        with ranks.noting_failure():
            if shows:
                library("tqdm")
            stored = list_stored(source)
    facts = [f"{arguments}, broadcast_from_rank0 {sends}"]
    facts += [one.fact() for one in entries]
    if not sends:
        facts += [one.fact() for one in stored]
    what = "model, checkpoint and arguments of load_sharded()"
    ranks.agree(facts, what, f"a checkpoint at '{source}'")
    return ranks.from_first(stored) if sends else stored
