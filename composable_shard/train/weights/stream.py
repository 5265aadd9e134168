"""Weights out of a sharded model: full tensors one after another, or what this rank holds.

Before a bucket is launched each rank says a word to all others: that it has the bucket before and
goes on, that it has left, or that it has failed. So nothing is launched that a rank does not take
part in, and a rank that goes away is an error on the others at their next bucket, not a wait.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from composable_shard import _torch
from composable_shard.arguments import (
    check_dtype,
    check_flags,
    check_function,
    check_int,
    check_type,
    check_value,
    checked_device,
)
from composable_shard.errors import ShardError
from composable_shard.train.full import Box, boxes_of
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Entry, Rename, contents_of, listed, listed_in
from composable_shard.train.weights.gathering import (
    BUCKET_NBYTES,
    Bucket,
    MakePlain,
    Planned,
    Routes,
    runs_within,
)

# Buckets one after another, with the next one under way -------------------------------------------

_GOES_ON, _LEFT, _FAILED = range(3)

Arrived = tuple[Planned, torch.Tensor]


@dataclass
class Stream:
    """Gathers rounds of buckets; while the tensors of one round are used, the next is under way.

    Attributes:
        rounds: The buckets of each round; the same on all ranks.
        ranks: The ranks that take part. What is noted there as a failure ends it on all of them.
        expected: What should happen, for messages.
        device: Where tensors are to be; ``None`` for where they are gathered.
        last: The last tensor that was given away, for messages.
    """

    rounds: Sequence[Sequence[Bucket]]
    ranks: Ranks
    expected: str
    device: torch.device | None
    last: str = "nothing"

    def run(self, advance: Callable[[int], object] = lambda _: None) -> Generator[Arrived]:
        """Yield the tensors that this rank gets.

        Args:
            advance: Told how many bytes have become whole.

        Raises:
            ShardError: On all ranks, if one has left or has failed.
            CommunicationError: If a rank has ended or does not answer within the time-out.

        Collective: those of the buckets; before each round, and after the last one, 8 bytes.
        """
        ahead = self._prepared(0)
        self._go_on()
        self._launch(ahead)
        for index, under_way in enumerate(self.rounds):
            self._wait(ahead)
            tensors = self._arrived(under_way)
            ahead = self._prepared(index + 1)
            self._go_on()
            self._launch(ahead)
            advance(sum(bucket.nbytes for bucket in under_way))
            try:
                while tensors:
                    self.last = f"'{tensors[0][0].name}'"
                    yield tensors.popleft()
            except BaseException:
                self._leave(ahead)
                raise

    # One round ------------------------------------------------------------------------------

    def _prepared(self, index: int) -> Sequence[Bucket]:
        """Have what the buckets of a round need, if there is such a round."""
        buckets = self.rounds[index] if index < len(self.rounds) else ()
        with self.ranks.noting_failure(), torch.no_grad():
            for bucket in buckets:
                bucket.prepare()
        return buckets

    def _launch(self, buckets: Sequence[Bucket]) -> None:
        with self.ranks.naming_failures():
            for bucket in buckets:
                bucket.launch()

    def _wait(self, buckets: Sequence[Bucket]) -> None:
        with self.ranks.naming_failures(), torch.no_grad():
            for bucket in buckets:
                bucket.wait()

    def _arrived(self, buckets: Sequence[Bucket]) -> deque[Arrived]:
        tensors = deque[Arrived]()
        with self.ranks.noting_failure(), torch.no_grad():
            for bucket in buckets:
                tensors += bucket.whole(self.device)
        return tensors

    # Words ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Go on if all ranks do; else raise ``ShardError`` on all that have not left."""
        failure = self.ranks.failure
        heard = self.ranks.say(_GOES_ON if failure is None else _FAILED)
        if not any(heard):
            return
        told = zip(self.ranks.numbers, self.ranks.gather(failure), strict=True)
        rank, text = next((rank, text) for rank, text in told if text is not None)
        raise ShardError(f"Expected {self.expected}, got on rank {rank}: {text}")

    def _leave(self, ahead: Sequence[Bucket]) -> None:
        """Wait for what is under way and tell the others that there will be no more."""
        if ahead:  # or nobody waits for a word
            self._wait(ahead)
            self.ranks.say(_LEFT)
            self.ranks.gather(f"it was left after {self.last}")


# Full tensors of a sharded model ------------------------------------------------------------------

Tied = Literal["first", "all"]
Subclasses = Literal["own", "plain"] | MakePlain


def iter_full(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_NBYTES,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    tied: Tied = "first",
    subclasses: Subclasses = "own",
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full parameters and persistent buffers of a sharded model, in its order.

    They are gathered bucket by bucket. All tensors of a bucket are there before the first of them
    is yielded, and the next bucket is on its way meanwhile; a consumer may communicate as it likes,
    also by collectives of the same ranks. The tensors are the consumer's own: nothing writes them
    again. The model must not change until the last one has been yielded.

    All ranks must iterate. One that leaves the loop early, by ``break`` or by an exception, ends it
    on all of them: the others raise when they need another bucket. Where all ranks leave at the
    same place nothing is raised. A generator that is kept in a variable is left when it is closed
    (``contextlib.closing``), and waits then until the others have come as far.

    Args:
        model: The model, sharded or not, the same on all ranks.
        bucket_bytes: How many bytes of full tensors are gathered together; a larger tensor is
            gathered alone.
        dtype: What floating-point tensors are cast to, shard by shard, before they are sent; their
            own if absent. Tensor subclasses in their own form keep theirs.
        rename: Given a name in the model, returns that to yield, or ``None`` to leave it out.
        device: Where full tensors are to be; where they are gathered if absent.
        rank0_only: Whether only the first rank gets them. The loops of the others yield nothing
            and end when that of the first rank does.
        tied: Whether a tensor that is tied comes under its ``"first"`` name, or under ``"all"`` of
            them, one after another, as the same object.
        subclasses: Whether tensor subclasses come in their ``"own"`` form, as ``full_tensor()``
            gathers them, or as the ``"plain"`` tensors that their ``dequantize()`` makes of each
            shard; or a function that is given a shard and makes a plain tensor of it.
        process_group: The ranks that hold this model; all of them if absent.

    Raises:
        TypeError: If an argument has the wrong type; like what follows, when the first tensor is
            asked for.
        ValueError: If an argument has another value than one of those above.
        ShardError: On all ranks: if an argument is wrong on some of them; if a tensor is on the
            meta device, if a tensor subclass cannot be made plain, if rename fails or gives two of
            them one name; later on, if a rank leaves early or fails. In a forward or backward.
        RankMismatchError: On all ranks, if their models or arguments differ.
        CommunicationError: If a rank has ended or does not answer within the time-out.

    Collective: an all-gather of a small object; for each bucket one of 8 bytes per rank and, for
        each mesh and each of its axes that shards, one gather: of all the tensors' bytes but this
        rank's own, or of none with ``rank0_only`` on other ranks. What a tensor subclass in its own
        form needs besides.
    Memory: two buckets and this rank's part of one. With ``rank0_only`` the part alone on other
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
    asked, planned = Asked(dtype, rename, tied, subclasses), list[Planned]()
    with ranks.checking():
        check_int("bucket_bytes", bucket_bytes, 1)
        check_flags(rank0_only=rank0_only)
        asked.check()
        place = None if device is None else checked_device("device", device)
        entries = contents_of(model, "iter_full")
    with ranks.noting_failure():
        planned = asked.planned(entries)
    facts = [f"bucket_bytes {bucket_bytes}, rank0_only {rank0_only}, {asked.fact()}"]
    facts += [entry.fact() for entry in entries]
    facts += [f"{one.names} for '{one.entry.names[0]}'" for one in planned]
    ranks.agree(facts, "model and arguments of iter_full()", "names for iter_full()")
    check_planned(planned, "iter_full()")
    routes, to = Routes(), ranks.numbers[0] if rank0_only else None
    rounds = [[Bucket(run, routes, to)] for run in runs_within(planned, bucket_bytes)]
    stream = Stream(rounds, ranks, "all ranks to go through iter_full() to its end", place)
    with contextlib.closing(stream.run()) as arriving:
        for one, full in arriving:
            for name in one.names:
                yield name, full
            del one, full  # or they would be held while the next bucket is finished


class Asked(NamedTuple):
    """Which tensors of a model are asked for, and in which form; see :func:`iter_full`."""

    dtype: torch.dtype | None = None
    rename: Rename | None = None
    tied: Tied = "first"
    subclasses: Subclasses = "own"

    def check(self) -> None:
        """Raise unless this can be asked for.

        Raises:
            TypeError: If something has the wrong type.
            ValueError: If it has another value than there is.
        """
        check_dtype("dtype", self.dtype)
        check_function("rename", self.rename)
        known = f"to be one of {get_args(Tied)}"
        check_value("tied", self.tied, self.tied in get_args(Tied), known)
        fits = callable(self.subclasses) or self.subclasses in ("own", "plain")
        check_value("subclasses", self.subclasses, fits, "to be 'own', 'plain' or a function")

    def fact(self) -> str:
        """Describe what must be the same on all ranks."""
        kind = "by a function" if callable(self.subclasses) else self.subclasses
        return f"dtype {self.dtype}, tied {self.tied}, subclasses {kind}"

    def planned(self, entries: Sequence[Entry]) -> list[Planned]:
        """Name the tensors that are not left out."""
        found = []
        for entry in entries:
            known = entry.names if self.tied == "all" else entry.names[:1]
            named = known if self.rename is None else map(self.rename, known)
            names = tuple(dict.fromkeys(name for name in named if name is not None))
            own = entry.tensor.dtype
            dtype = self.dtype if self.dtype and own.is_floating_point else own
            make: MakePlain | None = None
            if callable(self.subclasses):
                make = self.subclasses
            elif self.subclasses == "plain":
                make = type(entry.local).dequantize
            if names:
                found.append(Planned(names, entry, dtype, make))
        return found


def check_planned(
    planned: Sequence[Planned], what: str, of_class: str = "without dequantize()"
) -> None:
    """Raise ``ShardError`` if a tensor cannot be made what was asked for.

    Args:
        planned: The tensors.
        what: What they are for, for messages.
        of_class: What messages say of a tensor subclass that cannot be made plain.
    """
    taken: dict[str, str] = {}
    wrong: list[str] = []
    for one in planned:
        first = one.entry.names[0]
        for name in one.names:
            if name in taken:
                wrong.append(f"'{name}' for both '{taken[name]}' and '{first}'")
            taken[name] = first
        if one.entry.is_meta:
            wrong.append(f"'{first}' on the meta device")
        elif one.entry.plain is None and one.make_plain is torch.Tensor.dequantize:
            # which is for quantized dtypes, not for classes
            wrong.append(f"'{first}', a {type(one.entry.local).__name__} {of_class}")
    if wrong:
        raise ShardError(
            f"Expected tensors with values and names of their own for {what}, got {listed(wrong)}"
        )


# What a pass launches, moves and holds, before it is made -----------------------------------------


@dataclass(frozen=True)
class PassCosts:
    """What one pass of ``iter_full`` takes of this rank.

    Attributes:
        bucket_nbytes: Bytes of full tensors that are gathered together, or one larger tensor.
        num_buckets: How many buckets there are; before each, and after the last one, each rank
            sends all others a word of 8 bytes.
        launches: Gathers that are launched.
        messages: Tensors in all of them.
        sent_nbytes: Bytes that this rank sends.
        received_nbytes: Bytes that it receives.
        held_nbytes: Bytes that live at a time beside the model, at most, if the consumer lets each
            tensor go: those of two buckets, and this rank's part of one.
        by_class: Tensors that only their class makes whole: what that launches and holds besides is
            not counted.
    """

    bucket_nbytes: int
    num_buckets: int
    launches: int
    messages: int
    sent_nbytes: int
    received_nbytes: int
    held_nbytes: int
    by_class: tuple[str, ...]


def costs_of(model: nn.Module, bucket_nbytes: int) -> PassCosts:
    """Return what a pass takes of this rank.

    Args:
        model: The model, which stays as it is.
        bucket_nbytes: Bytes of a bucket.

    Collective: none.
    """
    routes, planned = Routes(), Asked().planned(listed_in(model))
    buckets = [Bucket(run, routes, None) for run in runs_within(planned, bucket_nbytes)]
    gathers = [[gather for m in bucket.messages for gather in m.gathers] for bucket in buckets]
    traffic = sum((num_ranks - 1) * sum(own) for num_ranks, own, *_ in chain(*gathers))
    parts = [sum(sum(own) for _, own, *_ in several) for several in gathers]
    return PassCosts(
        bucket_nbytes=bucket_nbytes,
        num_buckets=len(buckets),
        launches=sum(map(len, gathers)),
        messages=sum(len(own) for _, own, *_ in chain(*gathers)),
        sent_nbytes=traffic,
        received_nbytes=traffic,
        held_nbytes=2 * max(bucket.nbytes for bucket in buckets) + max(parts),
        by_class=tuple(one.name for bucket in buckets for one in bucket.by_class),
    )


# What this rank holds, and what of it has changed: nothing is communicated ------------------------

Version = tuple[int, ...]
"""Equal if nothing has been seen to change in between; its numbers mean nothing."""


# Attributes of tensors: with a weak reference to it, a parameter could no longer be converted.
_SERIAL = "_composable_shard_serial"  # which tensor it is, of all that this process has seen
_STEPS = "_composable_shard_num_steps"  # that optimizers have made which have it
_serials = count()


@cache
def _watch_steps() -> None:
    """Count the steps of all optimizers from now on.

    Hazard: a foreach or fused step moves no version counter. Guard: this. Test:
    ``test_every_change_is_seen``.
    """
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                vars(param)[_STEPS] = vars(param).get(_STEPS, 0) + 1


def _version(entry: Entry) -> Version:
    tensor, seen = entry.tensor, vars(entry.tensor)
    if _SERIAL not in seen:
        seen[_SERIAL] = next(_serials)
    leaves = _torch.leaves(entry.local)
    counted = {id(one): one for one in (tensor, entry.local, *leaves)}
    counters = sum(one._version for one in counted.values() if not one.is_inference())
    return seen[_SERIAL], seen.get(_STEPS, 0), counters, *(leaf.data_ptr() for leaf in leaves)


# What a rank holds --------------------------------------------------------------------------------


class LocalShard(NamedTuple):
    """A part of a full tensor that this rank holds.

    Attributes:
        name: The first name of the tensor in the model.
        box: Which part it is: a slice of each dim of the full tensor.
        tensor: The part itself, in the memory of the model.
        version: Compare it with a later one, by ``==``, to see whether the tensor has changed.
    """

    name: str
    box: Box
    tensor: torch.Tensor
    version: Version


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """Yield what this rank holds of the parameters and persistent buffers of a model.

    ``full[shard.box]`` is ``shard.tensor`` for every one of them, and together those of all ranks
    are all of the model. As a rule there is one for a tensor, none where a rank holds no row of it,
    and several where tensor parallelism leaves a rank rows that are no neighbours. What is
    replicated every rank yields as a whole. A tensor that is tied comes once.

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
    _watch_steps()
    for entry in contents_of(model, "local_shards"):
        local, version = entry.local.detach(), _version(entry)
        boxes = list(boxes_of(entry.tensor))
        for box, own in boxes:
            part = local if len(boxes) == 1 else local[own]
            yield LocalShard(entry.names[0], box, part, version)


def changed_since(model: nn.Module, versions: Mapping[str, Version]) -> list[str]:
    """Return the names of what has changed on this rank since :func:`local_shards` gave versions.

    Seen are writes in place, by whatever operation of torch, on the parameter or on its local
    tensor; loads; tensors that were put in the place of others; and steps of optimizers, for all
    parameters that they have and that need a gradient, whether these came out the same or not. Not
    seen are writes that torch does not count either: into ``.data``, through NumPy, or by foreach
    functions outside of an optimizer.

    Args:
        model: The model.
        versions: By name, the versions from before. What is not in it has changed.

    Returns:
        Names in the order of the model; those of which this rank holds nothing are left out.

    Raises:
        TypeError: If ``model`` is not a module, or ``versions`` no mapping.
        ShardError: In a forward or backward.

    Collective: none; ranks that do the same to a model see the same.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = {shard.name: shard.version for shard in local_shards(model)}
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)
        >>> changed_since(model, before)
        ['bias']
    """
    is_mapping = isinstance(versions, Mapping)
    check_type("versions", versions, is_mapping, "a mapping from names to versions")
    now = {shard.name: shard.version for shard in local_shards(model)}
    return [name for name, version in now.items() if versions.get(name) != version]
