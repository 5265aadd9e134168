"""Streaming the weights of a sharded model: full tensors one by one, or this rank's parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from composable_shard import _torch, arguments
from composable_shard.errors import ShardError
from composable_shard.train.full import Box, boxes_of
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights import gathering
from composable_shard.train.weights.entries import Entry, Rename, contents_of, listed
from composable_shard.train.weights.gathering import MakePlain, Planned

# Full tensors of a sharded model ------------------------------------------------------------------

Tied = Literal["first", "all"]
Subclasses = Literal["own", "plain"] | MakePlain


def iter_full(
    model: nn.Module,
    *,
    bucket_bytes: int = gathering.BUCKET_NBYTES,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    tied: Tied = "first",
    subclasses: Subclasses = "own",
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full parameters and persistent buffers of a sharded model, in its order.

    They are gathered bucket by bucket. All tensors of a bucket have arrived before the first of
    them is yielded, and the next bucket is in flight meanwhile; the consumer may call any
    collectives, also on the same ranks. The consumer owns the tensors: the library does not write
    them again. The model must not change until the last tensor has been yielded.

    All ranks must iterate. A rank that leaves the loop early, by ``break`` or by an exception, ends
    it on all ranks: the others raise when they need another bucket. If all ranks leave at the same
    tensor, nothing is raised. A generator that is kept in a variable ends when it is closed
    (``contextlib.closing``), and then waits until the other ranks have come as far.

    Args:
        model: The model, sharded or not, the same on all ranks.
        bucket_bytes: The bytes of full tensors that are gathered together; a larger tensor is
            gathered alone.
        dtype: The dtype to cast floating-point tensors to, shard by shard, before they are sent;
            their own if absent. Tensor subclasses in their own form keep their dtype.
        rename: Maps a name in the model to the name to yield, or to ``None`` to leave it out.
        device: The device of full tensors; by default the device on which they are gathered.
        rank0_only: Whether only the first rank gets full tensors. On the other ranks the loop body
            never runs, and the loop ends with that of the first rank.
        tied: Whether a tied tensor is yielded under its ``"first"`` name, or under ``"all"`` of its
            names, one after another, as the same object.
        subclasses: Whether tensor subclasses are yielded in their ``"own"`` form, as
            ``full_tensor()`` gathers them, or as ``"plain"`` tensors, by calling ``dequantize()``
            on each shard; or a function that makes a plain tensor from a shard.
        process_group: The ranks that hold this model; all of them if absent.

    Raises:
        TypeError: If an argument has the wrong type; raised, like all errors below, when the first
            tensor is requested.
        ValueError: If an argument has a value that is not listed above.
        ShardError: On all ranks: if an argument is wrong on some ranks; if a tensor is on the meta
            device, if a tensor subclass cannot be made plain, if ``rename`` fails or gives two
            tensors one name; later, if a rank leaves early or fails. In a forward or backward.
        RankMismatchError: On all ranks, if models or arguments differ.
        CommunicationError: If a rank has ended or does not answer within the time-out.

    Collective: an all-gather of a small object; for each bucket an all-gather of 8 bytes per rank
        and, for each mesh and each of its sharded axes, one gather: of the tensors' bytes on other
        ranks, or of none with ``rank0_only`` on other ranks. Further collectives for tensor
        subclasses in their own form.
    Memory: two buckets and this rank's part of one. With ``rank0_only``, only the part on other
        ranks, or less than a bucket if several axes shard.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def shapes():
        ...     model = fully_shard(nn.Linear(2, 4))
        ...     return [(name, list(full.shape)) for name, full in iter_full(model)]
        >>> run_threads(shapes, 2)[1]
        [('weight', [4, 2]), ('bias', [4])]
    """
    ranks = Ranks(process_group, "gathering full weights")
    with ranks.checking():
        arguments.check_int("bucket_bytes", bucket_bytes, 1)
        arguments.check_flags(rank0_only=rank0_only)
        arguments.check_dtype("dtype", dtype)
        arguments.check_function("rename", rename)
        ways = get_args(Tied)
        arguments.check_value("tied", tied, tied in ways, f"to be one of {ways}")
        fits = callable(subclasses) or subclasses in ("own", "plain")
        arguments.check_value("subclasses", subclasses, fits, "to be 'own', 'plain' or a function")
        place = None if device is None else arguments.checked_device("device", device)
        entries = contents_of(model, "iter_full")
    form = "by a function" if callable(subclasses) else subclasses
    asked = f"dtype {dtype}, tied {tied}, subclasses {form}"
    facts = [f"bucket_bytes {bucket_bytes}, rank0_only {rank0_only}, {asked}"]
    to = ranks.numbers[0] if rank0_only else None
    chosen = {"dtype": dtype, "rename": rename, "tied": tied, "subclasses": subclasses, "to": to}
    planned = agree_on_plan(entries, facts, ranks, "iter_full()", **chosen)
    buckets = list(map(gathering.Bucket, gathering.runs_within(planned, bucket_bytes)))
    with contextlib.closing(gathering.stream(buckets, ranks, place)) as arriving:
        for item, full in arriving:
            for name in item.names:
                yield name, full
            del item, full  # otherwise they stay alive while the next bucket is finished


def plan(
    entries: Sequence[Entry],
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    tied: Tied = "first",
    subclasses: Subclasses = "own",
    to: int | None = None,
) -> list[Planned]:
    """Plan the tensors of a model that are not left out, for one rank ``to`` or for all ranks.

    For the other arguments see :func:`iter_full`.
    """
    planned = []
    for entry in entries:
        known = entry.names if tied == "all" else entry.names[:1]
        named = known if rename is None else map(rename, known)
        names = tuple(dict.fromkeys(name for name in named if name is not None))
        cast = dtype if entry.tensor.dtype.is_floating_point else None
        make = subclasses if callable(subclasses) else None
        if subclasses == "plain":
            make = type(entry.local).dequantize
        if names:
            planned.append(Planned(names, entry, cast or entry.tensor.dtype, make, to))
    return planned


def agree_on_plan(
    entries: list[Entry], facts: list[str], ranks: Ranks, call: str, **chosen: Any
) -> list[Planned]:
    """Return the plan of the tensors of a model, the same on all ranks.

    Args:
        entries: The tensors.
        facts: The arguments of the call.
        ranks: The ranks.
        call: The call, for messages.
        chosen: The choices for :func:`plan`, which fails if ``rename`` does.

    Raises:
        RankMismatchError: On all ranks, if models, arguments or names differ.
        ShardError: On all ranks, if a rank has failed, or a tensor cannot be gathered as planned.

    Collective: an all-gather of a small object.
    """
    planned = list[Planned]()
    with ranks.noting_failure():
        planned = plan(entries, **chosen)
    named = {id(item.entry): " and ".join(map(repr, item.names)) for item in planned}
    called = [f"{entry.fact()}, called {named.get(id(entry), 'nothing')}" for entry in entries]
    ranks.agree(*facts, *called, what=f"model and arguments of {call}")
    taken: dict[str, str] = {}
    wrong: list[str] = []
    for item in planned:
        first = item.entry.names[0]
        for name in item.names:
            if name in taken:
                wrong.append(f"'{name}' for both '{taken[name]}' and '{first}'")
            taken[name] = first
        if item.entry.is_meta:
            wrong.append(f"'{first}' on the meta device")
        elif item.entry.plain is None and item.make_plain is torch.Tensor.dequantize:
            # which is for quantized dtypes, not for classes
            wrong.append(f"'{first}', a {type(item.entry.local).__name__} of several tensors")
    if wrong:
        raise ShardError(
            f"Expected tensors with values and names of their own for {call}, got {listed(wrong)}"
        )
    return planned


# The parts of this rank, and their changes: nothing is communicated -------------------------------

Version = tuple[int, ...]  # equal if no change was seen in between; it has no other meaning


# An attribute of tensors: with a weak reference to it, a parameter could no longer be converted.
_NUMBER = "_composable_shard_number"  # of the tensor in this process; each optimizer step adds 1
_numbers = count(step=2**32)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    """Count a step of an optimizer.

    Hazard: a foreach or fused step changes no version counter. Guard: this hook. Test:
    ``test_every_change_is_seen``.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and _NUMBER in vars(param):
                vars(param)[_NUMBER] += 1


@cache
def _count_steps() -> None:
    """Begin to count the steps of optimizers; nothing is counted before the first version."""
    register_optimizer_step_post_hook(_count_step)


def _version(entry: Entry) -> Version:
    _count_steps()
    number = vars(entry.tensor).setdefault(_NUMBER, next(_numbers))
    leaves = _torch.leaves(entry.local)
    counted = {id(item): item for item in (entry.tensor, entry.local, *leaves)}
    counters = sum(item._version for item in counted.values() if not item.is_inference())
    return number, counters, *(leaf.data_ptr() for leaf in leaves)


class LocalShard(NamedTuple):
    """A part of a full tensor that this rank holds.

    Attributes:
        name: The first name of the tensor in the model.
        box: Its place: a slice of each dim of the full tensor.
        tensor: The part itself, in the memory of the model.
        version: Compare it with a later version by ``==`` to find whether the tensor has changed.
    """

    name: str
    box: Box
    tensor: torch.Tensor
    version: Version


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """Yield this rank's parts of the parameters and persistent buffers of a model.

    ``full[shard.box]`` equals ``shard.tensor`` for every part, and the parts of all ranks form the
    model. Usually a tensor has one part on a rank. It has none if the rank holds no rows, and
    several if tensor parallelism leaves it rows that are not contiguous. Every rank yields
    replicated tensors in full. A tied tensor is yielded once.

    Args:
        model: The model, sharded or not.

    Raises:
        TypeError: If ``model`` is not a module.
        ShardError: In a forward or backward.

    Collective: none.
    Memory: none; tensors are views of the model's.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def held():
        ...     model = fully_shard(nn.Linear(2, 3, bias=False))
        ...     return [(shard.box[0], shard.tensor.shape) for shard in local_shards(model)]
        >>> run_threads(held, 2)
        [[(slice(0, 2, None), torch.Size([2, 2]))], [(slice(2, 3, None), torch.Size([1, 2]))]]
    """
    for entry in contents_of(model, "local_shards"):
        local, version = entry.local.detach(), _version(entry)
        boxes = list(boxes_of(entry.tensor))
        for box, local_box in boxes:
            part = local if len(boxes) == 1 else local[local_box]
            yield LocalShard(entry.names[0], box, part, version)


def changed_since(model: nn.Module, versions: Mapping[str, Version]) -> list[str]:
    """Return the names of tensors that have changed on this rank since :func:`local_shards`.

    It detects in-place writes by any torch operation, on the parameter or on its local tensor;
    loads; replaced tensors; and optimizer steps, which count for all of the optimizer's parameters
    that need a gradient, even if their values stay the same. It does not detect writes that torch
    does not count: into ``.data``, through NumPy, or by foreach functions outside of an optimizer.

    Args:
        model: The model.
        versions: The earlier versions by name. A name that is not in it counts as changed.

    Returns:
        Names in the order of the model, without tensors that have no part on this rank.

    Raises:
        TypeError: If ``model`` is not a module, or ``versions`` no mapping.
        ShardError: In a forward or backward.

    Collective: none; ranks that change a model in the same way get the same names.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = {shard.name: shard.version for shard in local_shards(model)}
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)
        >>> changed_since(model, before)
        ['bias']
    """
    is_mapping = isinstance(versions, Mapping)
    arguments.check_type("versions", versions, is_mapping, "a mapping from names to versions")
    now = {shard.name: shard.version for shard in local_shards(model)}
    return [name for name, version in now.items() if versions.get(name) != version]
