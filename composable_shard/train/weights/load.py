"""Reading a checkpoint into shards, each rank its own rows."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from composable_shard.errors import ShardError
from composable_shard.train.extras import library
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Contents, contents_of
from composable_shard.train.weights.files import EXTRA, Stored, list_stored
from composable_shard.train.weights.matching import RENAMED, Rename, listed, match
from composable_shard.train.weights.progress import Progress
from composable_shard.train.weights.reading import Reading


class NotLoaded(NamedTuple):
    """What a checkpoint and a model do not share.

    Attributes:
        missing_keys: Names of the model that the checkpoint lacks; left as they were.
        unexpected_keys: Names of the checkpoint that the model lacks.
        left_on_meta: Non-persistent buffers on the meta device, which no checkpoint has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    left_on_meta: list[str]


def load_sharded(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    broadcast_from_rank0: bool = False,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> NotLoaded:
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
        What was not loaded; on all ranks the same.

    Raises:
        TypeError: If ``model`` is not a module.
        ShardError: On all ranks, before anything is read: if a rank cannot open the checkpoint or
            lacks a library for it, if names or shapes differ, a dtype cannot be cast (floating
            point into integers), or a parameter is a tensor subclass of several tensors. On all
            ranks, at the end: if a rank failed to read, or tied names differ; the model is then
            partly loaded. In a forward or backward.
        RankMismatchError: On all ranks, if their models or checkpoints differ, or what ``rename``
            returns.
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
        ...     load_sharded(layer, file)
        ...     return layer.weight.to_local().shape
        >>> run_threads(load, 2)
        [torch.Size([2, 2]), torch.Size([2, 2])]
    """
    ranks = Ranks(process_group, f"loading '{source}'")
    contents = contents_of(model, "load_sharded")
    shows = progress and ranks.is_first
    stored = _agree_on_stored(ranks, contents, source, sends=broadcast_from_rank0, shows=shows)
    matching = match(contents.entries, stored, rename, source)
    if rename is not None:
        ranks.agree(matching.facts(), None, RENAMED)
    if strict:
        matching.check_names()
    matching.check_values()
    reading = Reading(matching.matches, ranks, strict=strict)
    with Progress(f"loading {Path(source).name}", reading.nbytes, shown=shows) as bar:
        failure = reading.run(model, bar, sends=broadcast_from_rank0)
    said = ranks.agree([], failure, "tensors")
    if said is not None:
        raise ShardError(
            f"Expected to load '{source}', got {said}; the model is partly loaded, load it again"
        )
    if contents.left_on_meta and ranks.is_first:
        warnings.warn(
            f"No checkpoint has the non-persistent buffers {listed(contents.left_on_meta)}, which "
            "are still on the meta device; compute them as the constructor of their module does",
            stacklevel=2,
        )
    return NotLoaded(matching.missing, matching.unexpected, contents.left_on_meta)


def _agree_on_stored(
    ranks: Ranks, contents: Contents, source: str | os.PathLike[str], *, sends: bool, shows: bool
) -> list[Stored]:
    """Return the tensors of the checkpoint if all ranks have the same ones, and the same model."""
    stored: list[Stored] = []
    failure: str | None = None
    if ranks.is_first or not sends:
        try:
            if shows:
                library("tqdm", EXTRA)
            stored = list_stored(source)
        except Exception as error:  # noqa: BLE001 (whatever it is, all ranks shall hear of it)
            failure = f"{type(error).__name__}: {error}"
    if sends:
        stored = ranks.from_first(stored)
    facts = [one.fact() for one in contents.entries] + [one.fact() for one in stored]
    said = ranks.agree(facts, failure, "model and checkpoint")
    if said is not None:
        raise ShardError(f"Expected a checkpoint at '{source}', got {said}")
    return stored
