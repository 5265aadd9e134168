"""Reading a checkpoint into shards, each rank its own rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_function, check_path
from composable_shard.train.full import count_write, repeated_dims, same_bits, unrepeated
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.boxes import Box, Parts
from composable_shard.train.weights.entries import (
    Contents,
    Entry,
    Match,
    Rename,
    contents_of,
    listed,
    match,
    materialize,
    renamed,
)
from composable_shard.train.weights.files import (
    Reader,
    Stored,
    library,
    list_stored,
    progress_bar,
)

# The values of a checkpoint on their way into a model, tensor by tensor ---------------------------


class Reading:
    """Reads what was matched.

    A rank that fails goes on to receive and to send, so that the others do not wait for it.

    Args:
        matches: What goes where; the same on all ranks.
        ranks: The ranks that take part.
        strict: Whether tied names must hold the same values.

    Attributes:
        nbytes: How many bytes the tensors have, in the files.
    """

    def __init__(self, matches: Sequence[Match], ranks: Ranks, *, strict: bool) -> None:
        files = {stored.file: None for match in matches for stored in match.stored}
        order = {file: place for place, file in enumerate(files)}
        self._matches = sorted(matches, key=lambda match: order[match.stored[0].file])
        self._ranks = ranks
        self._strict = strict
        self._parts = Parts()
        self.nbytes = sum(stored.nbytes for match in matches for stored in match.stored)
        self._buffer: torch.Tensor | None = None

    def run(self, model: nn.Module, advance: Callable[[int], object], *, sends: bool) -> None:
        """Read everything; what goes wrong on this rank is noted.

        Args:
            model: The model that the tensors are in.
            advance: Told how many bytes are done.
            sends: Whether the first rank reads and sends to the others.

        Collective: with ``sends`` a broadcast of each tensor.
        """
        ranks = self._ranks
        with torch.inference_mode(False), torch.no_grad(), Reader() as reader:
            with ranks.noting_failure():
                materialize(model, [match.entry for match in self._matches])
            for match in self._matches:
                count_write(match.entry.local)  # also where this rank has no rows, or fails
            for match in self._matches:
                for stored in match.stored:
                    full = self._sent(stored, reader) if sends else None
                    if ranks.failure is None:
                        with ranks.noting_failure():
                            self._fill(match, stored, full, reader)
                    elif not sends:
                        return
                    advance(stored.nbytes)

    def _fill(
        self, match: Match, stored: Stored, full: torch.Tensor | None, reader: Reader
    ) -> None:
        """Write this rank's part of a tensor, or compare it if a tied name has filled it."""
        is_again = self._strict and stored is not match.stored[0]
        for target, box in self._targets(match.entry):
            piece = reader.read(stored, box) if full is None else full[box]
            piece = piece.reshape(target.shape)
            what = f"'{match.stored[0].name}' and '{stored.name}', which the model ties"
            if not is_again:
                repeated = repeated_dims(target)
                unrepeated(target, repeated).copy_(unrepeated(piece, repeated))
                if not repeated:
                    continue
                what = f"all parts of '{stored.name}' along {repeated}, which are one in the model"
            if not same_bits(target, piece.to(target.device, target.dtype)):
                raise ValueError(f"Expected {what}, to hold the same, got different values")

    def _targets(self, entry: Entry) -> Iterator[tuple[torch.Tensor, Box]]:
        plain = entry.plain
        assert plain is not None
        for box, own in self._parts.boxes(entry.tensor):
            yield plain[own], box

    def _sent(self, stored: Stored, reader: Reader) -> torch.Tensor:
        """Return a full tensor, read by the first rank. Collective: a broadcast of its bytes."""
        group, sent = self._ranks.group, self._room(stored.nbytes)
        if self._ranks.is_first and self._ranks.failure is None and len(sent):
            with self._ranks.noting_failure():
                full = reader.read(stored, tuple(slice(0, length) for length in stored.shape))
                own = full.reshape(-1).view(torch.uint8)
                sent = own if sent.device == own.device else sent.copy_(own)
        if group is not None and len(sent):
            with self._ranks.naming_failures():
                dist.broadcast(sent, group=group, group_src=0)
        return sent.view(stored.dtype).view(stored.shape)

    def _room(self, nbytes: int) -> torch.Tensor:
        """Return bytes to receive into: always the same ones, where the ranks communicate."""
        if self._buffer is None:
            largest = max(one.nbytes for match in self._matches for one in match.stored)
            device, group = torch.device("cpu"), self._ranks.group
            if group is not None:
                device = _torch.device_for(group, device)
            self._buffer = _torch.empty(largest, dtype=torch.uint8, device=device)
        return self._buffer[:nbytes]


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
        for names, what in (
            (self.missing_keys, "missing"),
            (self.unexpected_keys, "unexpected"),
        ):
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
        contents = contents_of(model, "load_sharded")
    shows = progress and ranks.is_first
    arguments = f"strict {strict}, {'no ' if rename is None else ''}rename"
    stored = _agree_on_stored(
        ranks, contents, arguments, source, sends=broadcast_from_rank0, shows=shows
    )
    expected = f"names from rename for '{source}'"
    names = renamed([one.name for one in stored], rename, ranks, expected)
    matching = match(contents.entries, stored, names, source)
    if strict:
        matching.check_names()
    matching.check_values()
    reading = Reading(matching.matches, ranks, strict=strict)
    with progress_bar(f"loading {Path(source).name}", reading.nbytes, shown=shows) as advance:
        reading.run(model, advance, sends=broadcast_from_rank0)
    ranks.agree(
        [],
        "tensors",
        f"to load '{source}'",
        remedy="; the model is partly loaded, load it again",
    )
    if contents.left_on_meta and ranks.is_first:
        warnings.warn(
            f"No checkpoint has the non-persistent buffers {listed(contents.left_on_meta)}, which "
            "are still on the meta device; compute them as the constructor of their module does",
            stacklevel=2,
        )
    return Loaded(
        matching.missing, matching.unexpected, contents.left_on_meta, len(matching.matches)
    )


def _agree_on_stored(
    ranks: Ranks,
    contents: Contents,
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
    facts += [one.fact() for one in contents.entries]
    if not sends:
        facts += [one.fact() for one in stored]
    what = "model, checkpoint and arguments of load_sharded()"
    ranks.agree(facts, what, f"a checkpoint at '{source}'")
    return ranks.from_first(stored) if sends else stored
