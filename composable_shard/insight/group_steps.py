"""A step of one group: its traffic, its copies, and how long its parameters stay.

Everything is read off the buckets of the group; nothing is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.codec import Format, flatten, has_extension
from composable_shard.core.extension import ExtensionBucket, num_tensors
from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import message_numels
from composable_shard.core.program import reduced_together
from composable_shard.core.reduction import (
    LocalReduction,
    final_grad_dtype,
    packing_step,
    sent_dtype,
    with_own_message,
)
from composable_shard.core.storage import Bucket, ShardedParam, Storage
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import (
    CustomAllGather,
    CustomReduceScatter,
    sum_dtype,
)
from composable_shard.insight.recording import join

Names = Mapping[nn.Module, str]
"""Names of modules within the explained model."""


def short(dtype: object) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


# How long the unsharded parameters of a group stay, and why ---------------------------------------


class Residence(NamedTuple):
    """How long the unsharded parameters stay.

    Attributes:
        in_backward: How they come back for backward: ``"kept"``, ``"gathered"``, ``"regathered"``
            from neighbours, or ``"unread"``.
        why: The reason, a sentence.
    """

    in_backward: str
    why: str


def residence_of(group: ParamGroup) -> Residence:
    """Return how the parameters of a group come back for backward.

    The last step decides. Before the first one, groups count as run in the order in which they are
    registered.
    """
    settings = group.settings
    reshard = settings.reshard_after_forward
    if not group.params:
        return Residence("unread", "backward reads no parameters of this group: it has none")
    if not settings.unshard_in_backward:
        return Residence("unread", "set_unshard_in_backward(False): backward gathers nothing")
    if not _has_backward(group):
        return Residence(
            "unread", "backward does not reach it: nothing in it or before it is trained"
        )
    if reshard is None and group is group.tree.root:
        why = "it is the root, whose parameters backward needs first, so they are kept"
        return Residence("kept", why)
    if reshard is False:
        return Residence("kept", "reshard_after_forward=False keeps the parameters until backward")
    if _ends_forward_and_begins_backward(group):
        why = "it is last in forward and first in backward, so from the second step on it is kept"
        return Residence("kept", why)
    if reshard is None or reshard is True:
        why = "the parameters are freed after forward and gathered again for backward"
        if settings.keeps_storage:
            why = "the parameters are gathered again for backward, into memory that is kept"
        return Residence("gathered", why)
    why = (
        f"after forward each of {reshard} neighbours keeps a part of all parameters, from which "
        "backward gathers them again"
    )
    return Residence("regathered", why)


def _ends_forward_and_begins_backward(group: ParamGroup) -> bool:
    tree = group.tree
    if tree.plan.groups:
        return bool(tree.tape.has_turned_at(tree.root, group))
    *before, last = [member for member in tree.groups if member.params]
    encloses = (set(group.modules) & set(member.all_modules()) for member in before)
    return group is last and not any(encloses)


def _has_backward(group: ParamGroup) -> bool:
    """Return whether backward reaches the group; before the first step, whether it may."""
    tree = group.tree
    if tree.plan.groups:
        return group in tree.plan.groups
    places = {module: place for place, module in enumerate(tree.root.all_modules())}
    end = max(places[module] for module in group.all_modules())
    params = (param for member in tree.groups for param in member.params)
    return any(
        param.sharded.requires_grad for param in params if places[param.slots[0].module] <= end
    )


# Messages and bytes of one step -------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """The traffic that this rank sends; it receives as much.

    Attributes:
        launches: Calls of a collective.
        messages: Tensors in all of them; each goes to, or over, every other rank.
        nbytes: Bytes that this rank sends, padding included; those of an all-reduce as in a ring.
            ``None`` before the first gather of a tensor subclass.
    """

    launches: int = 0
    messages: int = 0
    nbytes: int | None = 0

    def __add__(self, other: Traffic) -> Traffic:
        known = self.nbytes is not None and other.nbytes is not None
        return Traffic(
            self.launches + other.launches,
            self.messages + other.messages,
            (self.nbytes or 0) + (other.nbytes or 0) if known else None,
        )


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one step.

    Attributes:
        forward_gathers: Gathers for forward.
        backward_gathers: Gathers for backward.
        reductions: Gradients over the shards.
        all_reduces: Gradients over the replicas.
    """

    forward_gathers: Traffic = Traffic()
    backward_gathers: Traffic = Traffic()
    reductions: Traffic = Traffic()
    all_reduces: Traffic = Traffic()

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(*map(Traffic.__add__, self.parts.values(), other.parts.values()))

    @property
    def parts(self) -> dict[str, Traffic]:
        """Each part, by its heading in tables."""
        return {
            field.name.replace("all_", "all-").replace("_", " "): getattr(self, field.name)
            for field in fields(self)
        }

    @property
    def total(self) -> Traffic:
        """The sum of all parts."""
        return total(self.parts.values())


def total(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of parts."""
    return sum(parts, Traffic())


def _launched(sent: Sequence[int] | None, num_ranks: int) -> Traffic:
    """Return the traffic of a launch of messages of so many bytes to each other rank."""
    if sent is None:
        return Traffic(1, 1, None)
    return Traffic(1, len(sent), (num_ranks - 1) * sum(sent)) if sent else Traffic()


# Copies of one step, and the reasons --------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A copy in memory, besides the receipt of a message.

    Attributes:
        kind: ``"cast"``, ``"packed"``, ``"permuted"``, ``"padded"``, ``"moved"`` to another device,
            or ``"kept"``.
        parameters: The names of its parameters.
        nbytes: Bytes that are written each time.
        times: How often in a step.
        why: The reason, a sentence.
    """

    kind: str
    parameters: tuple[str, ...]
    nbytes: int
    times: int
    why: str


# The gather of one bucket -------------------------------------------------------------------------


def unsharded_nbytes(bucket: Storage) -> int | None:
    """Return the bytes of a gathered bucket; ``None`` before a subclass is gathered."""
    if isinstance(bucket, Bucket):
        numel = 0 if bucket.shares_storage else bucket.layout.unsharded_numel
        return numel * bucket.compute_dtype.itemsize
    sent = messages_of(bucket)
    return None if sent is None else bucket.mesh.num_shards * sum(sent)


def sharded_nbytes(bucket: Storage) -> int:
    """Return the bytes of this rank's shards, padding included."""
    leaves = [bucket.sharded] if isinstance(bucket, Bucket) else _torch.leaves(bucket.locals[0])
    return sum(leaf.numel() * leaf.itemsize for leaf in leaves)


def messages_of(bucket: Storage) -> tuple[int, ...] | None:
    """Return the bytes of each message of a gather; ``None`` before a subclass is gathered.

    The hook of a subclass is not called: it may communicate, and may count its calls.
    """
    if bucket.mesh.num_shards == 1:
        return ()
    if isinstance(bucket, Bucket):
        spans, itemsize = bucket.layout.message_spans, bucket.compute_dtype.itemsize
        return tuple(numel * itemsize for _, numel in spans)
    assert isinstance(bucket, ExtensionBucket)
    if bucket.formats is not None:
        return tuple(map(_padded_nbytes, zip(*bucket.formats, strict=True)))
    if has_extension(bucket.param.local):
        return None
    inner, _ = flatten([bucket.param.local])
    return tuple(bucket.param.layout.param.shard_numel * tensor.itemsize for tensor in inner)


def _padded_nbytes(formats: Sequence[Format]) -> int:
    """Return the bytes that each rank sends of a tensor, padded to the most rows of a rank."""
    rows = max(theirs.shape[0] for theirs in formats)
    return rows * prod(formats[0].shape[1:]) * formats[0].dtype.itemsize


# One group ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterExplanation:
    """One parameter.

    Attributes:
        name: Its name in the model.
        shape: Its global shape.
        dtype: The dtype of its shard.
        placements: The placements of its DTensor.
        num_shards: Ranks that share it.
        num_replicas: Ranks that hold the same shard.
        is_trained: Whether it has gradients.
        sharded_nbytes: Bytes of this rank's shard, padding included.
        gathered_nbytes: Bytes of the gathered parameter, padding included; ``None`` before the
            first gather of a tensor subclass.
        travels: How it is gathered: ``"in place"``, ``"packed"``, ``"permuted"``, ``"as a
            subclass"`` or ``"not at all"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    num_shards: int
    num_replicas: int
    is_trained: bool
    sharded_nbytes: int
    gathered_nbytes: int | None
    travels: str


class GroupStep:
    """One step of a group in which each of its modules is called once.

    Attributes:
        group: The group.
        name: Its name in texts.
        names: The names of modules.
        residence: How long the unsharded parameters stay.
        channels: The collectives that carry parameters; of a group without any, all.
        reductions: Its reductions, each in its own launch.
    """

    def __init__(self, group: ParamGroup, name: str, names: Names) -> None:
        self.group, self.name, self.names = group, name, names
        self.residence = residence_of(group)
        self._num_neighbours = int(group.settings.reshard_after_forward or 1)
        used = {bucket.mesh for bucket in group.buckets}
        self.channels = [c for mesh, c in group.channels.items() if mesh in used or not used]
        trained = [
            p for p in group.params if p.sharded.requires_grad or p.name in group.unsynced_names
        ]
        self.reductions = [
            ReductionStep(self, kind is LocalReduction, buckets, params, dtype)
            for kind, buckets, params, dtype in reduced_together(group, trained)
        ]

    @property
    def params(self) -> list[tuple[ShardedParam, ParameterExplanation]]:
        """Each parameter and its explanation."""
        return [pair for bucket in self.group.buckets for pair in self._params_of(bucket)]

    def _params_of(self, bucket: Storage) -> Iterator[tuple[ShardedParam, ParameterExplanation]]:
        sharded, gathered = sharded_nbytes(bucket), unsharded_nbytes(bucket)
        travels = "as a subclass"
        for index, param in enumerate(bucket.params):
            layout = param.layout.param
            if isinstance(bucket, Bucket):
                sharded = layout.shard_numel * bucket.dtype.itemsize
                gathered = layout.num_shards * layout.shard_numel * bucket.compute_dtype.itemsize
                travels = "packed" if layout.gathers_in_place else "permuted"
                if layout.num_shards == 1 or index < bucket.layout.num_direct:
                    travels = "in place" if layout.num_shards > 1 else "not at all"
            dims = [getattr(placement, "dim", None) for placement in param.placement.sharded]
            yield (
                param,
                ParameterExplanation(
                    name=self.names_of([param])[0],
                    shape=tuple(param.shape),
                    dtype=short(param.local.dtype),
                    placements=tuple("Replicate" if d is None else f"Shard({d})" for d in dims),
                    num_shards=param.mesh.num_shards,
                    num_replicas=param.mesh.num_replicas,
                    is_trained=param.sharded.requires_grad,
                    sharded_nbytes=sharded,
                    gathered_nbytes=gathered,
                    travels=travels,
                ),
            )

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of the shards of one rank, padding included."""
        return sum(map(sharded_nbytes, self.group.buckets))

    @property
    def unsharded_nbytes(self) -> int | None:
        """Bytes of the gathered parameters; ``None`` before a subclass is gathered."""
        found = [unsharded_nbytes(bucket) for bucket in self.group.buckets]
        known = [nbytes for nbytes in found if nbytes is not None]
        return sum(known) if len(known) == len(found) else None

    def names_of(self, params: Iterable[ShardedParam]) -> tuple[str, ...]:
        """Return the names of parameters in the model; of tied parameters, the first one."""
        slots = [param.slots[0] for param in params]
        return tuple(join(self.names.get(slot.module, ""), slot.name) for slot in slots)

    def traffic(self) -> StepTraffic:
        """Return the traffic of the group."""
        gathers = total(map(self._gather_traffic, self.group.buckets))
        backward = Traffic()
        if self.residence.in_backward == "gathered":
            backward = gathers
        elif self.residence.in_backward == "regathered":
            backward = total(map(self._regather_traffic, self.group.buckets))
        reductions = self.reductions if self.group.settings.reduce_grads else []
        reduced = total(reduction.reduce_traffic() for reduction in reductions)
        all_reduced = total(reduction.all_reduce_traffic() for reduction in reductions)
        return StepTraffic(gathers, backward, reduced, all_reduced)

    def _gather_traffic(self, bucket: Storage) -> Traffic:
        """Return the traffic of the all-gather for one use: a launch for each bucket."""
        sent = messages_of(bucket)
        if sent and isinstance(self.group.channels[bucket.mesh].all_gather, CustomAllGather):
            sent = (sum(sent),)
        return _launched(sent, bucket.mesh.num_shards)

    def _regather_traffic(self, bucket: Storage) -> Traffic:
        """Return the traffic of a gather from neighbours; each of them keeps an equal part."""
        if bucket.mesh.num_shards == 1:
            return Traffic()
        part = None if isinstance(bucket, ExtensionBucket) else (self._kept_nbytes(bucket),)
        return _launched(part, self._num_neighbours)

    def _kept_nbytes(self, bucket: Storage) -> int:
        return (unsharded_nbytes(bucket) or 0) // self._num_neighbours

    def copies(self) -> tuple[Copy, ...]:
        """Return the packs, copies and casts of the group."""
        found = [
            copy
            for bucket in self.group.buckets
            if isinstance(bucket, Bucket)
            for copy in self._copies_of_gather(bucket)
        ]
        if self.group.settings.reduce_grads:
            for reduction in self.reductions:
                found += reduction.copies()
        return tuple(copy for copy in found if copy.nbytes)

    def copy(
        self, kind: str, params: Iterable[ShardedParam], nbytes: int, why: str, times: int = 1
    ) -> Copy:
        """Return a copy of these parameters; without bytes, there is none."""
        return Copy(kind, self.names_of(params), nbytes, times, why)

    def _copies_of_gather(self, bucket: Bucket) -> Iterator[Copy]:
        times = 2 if self.residence.in_backward == "gathered" else 1
        layout, itemsize = bucket.layout, bucket.compute_dtype.itemsize
        stored, dtype = short(bucket.dtype), short(bucket.compute_dtype)
        in_order = sorted(zip(layout.order, bucket.params, strict=True), key=lambda pair: pair[0])
        params = [param for _, param in in_order]
        if is_away(params[0]):
            why = "shards on the CPU are copied to the device of compute before each gather"
            yield self.copy("moved", params, sharded_nbytes(bucket), why, times)
        if stored != dtype:
            numel, why = layout.unsharded_numel, f"stored as {stored}, computed with as {dtype}"
            if bucket.mesh.num_shards > 1:
                numel = layout.shard_numel
                why = (
                    f"shards stored as {stored} are cast to {dtype} in one kernel before each "
                    "gather, so that fewer bytes travel"
                )
            yield self.copy("cast", params, numel * itemsize, why, times)
        ways: dict[str, list[ShardedParam]] = defaultdict(list)
        for param, explanation in self._params_of(bucket):
            ways[explanation.travels].append(param)
        numel = sum(param.layout.param.numel for param in ways["permuted"])
        why = "sharded on an inner dim, so shards laid end to end are not the parameter"
        yield self.copy("permuted", ways["permuted"], numel * itemsize, why, times)
        layouts = [param.layout.param for param in ways["packed"]]
        numel = sum(packed.num_nonempty * packed.shard_numel for packed in layouts)
        why = (
            "too small to be worth a message of their own: they share one and are copied out of it"
        )
        yield self.copy("packed", ways["packed"], numel * itemsize, why, times)
        if self.residence.in_backward == "regathered":
            count = self._num_neighbours
            why = f"each of {count} neighbours keeps a part of all parameters from forward to "
            yield self.copy("kept", params, self._kept_nbytes(bucket), f"{why}backward")


def is_away(param: ShardedParam) -> bool:
    """Return whether its shard is kept on the CPU while compute is on a device."""
    return _torch.has_streams(param.mesh.device) and param.offload is not None


class ReductionStep:
    """The gradients of one group that are reduced together.

    Attributes:
        mesh: The mesh of the ranks.
        dtype: The dtype of the sum.
    """

    def __init__(
        self,
        step: GroupStep,
        is_alone: bool,
        buckets: Sequence[Storage],
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
    ) -> None:
        """Plan the reduction.

        Args:
            step: The step of the group.
            is_alone: Whether the gradients are the result, without a reduction.
            buckets: Buckets over one mesh.
            params: Their parameters with gradients to reduce.
            dtype: The dtype of the sum.
        """
        mesh = self.mesh = buckets[0].mesh
        self._step, self._is_alone, self.dtype = step, is_alone, dtype
        self._channel: Channel = step.group.channels[mesh]
        self._large = with_own_message(buckets, dtype)
        members = [param for param in params for _ in range(num_tensors(param))]
        self._direct = [p for p in members if p in self._large and p.layout.param.is_even]
        self._packed = [param for param in members if param not in set(self._direct)]
        self._members = [*self._direct, *self._packed]  # in the order of the messages
        self._finals = [final_grad_dtype(param, dtype) for param in self._members]
        self._numels = message_numels(
            [param.layout.param for param in self._members],
            len(self._direct),
            packing_step((dtype, *self._finals), mesh.device),
        )
        self._grad_dtype = buckets[0].compute_dtype
        self._sent_dtype = sent_dtype(buckets, dtype, self._channel)
        self._is_all_reduced = mesh.num_replicas > 1 and step.group.settings.all_reduce_grads
        is_widened = self._channel.divides_over_replicas(dtype)
        self._replica_dtype = sum_dtype(dtype) if is_widened else dtype

    def reduce_traffic(self) -> Traffic:
        """Return the traffic of the reduction over the shards."""
        if self.mesh.num_shards == 1:
            return Traffic()
        sent = [numel * self.dtype.itemsize for numel in self._numels]
        is_custom = isinstance(self._channel.reduce_scatter, CustomReduceScatter)
        return _launched([sum(sent)] if is_custom else sent, self.mesh.num_shards)

    def all_reduce_traffic(self) -> Traffic:
        """Return the traffic of the reduction over the replicas: around a ring, twice."""
        if not self._is_all_reduced:
            return Traffic()
        nbytes, num = sum(self._numels) * self._replica_dtype.itemsize, self.mesh.num_replicas
        return Traffic(1, 1, 2 * (num - 1) * nbytes // num)

    def copies(self) -> Iterator[Copy]:
        """Yield the copies of gradients before they are sent, and of the result."""
        if self._is_alone:
            return
        dtype, itemsize, copy = short(self.dtype), self.dtype.itemsize, self._step.copy
        num_shards, nbytes = self.mesh.num_shards, sum(self._numels) * self.dtype.itemsize
        if self._sent_dtype != self._grad_dtype:
            numel = sum(param.layout.param.numel for param in self._direct)
            why = f"gradients are cast to {dtype}, in which they are summed"
            yield copy("cast", self._direct, numel * itemsize, why)
        permuted = [param for param in self._members if param.layout.param.outer > 1]
        numel = sum(param.layout.param.numel for param in permuted)
        why = "gradients of parameters sharded on an inner dim are laid out shard by shard"
        yield copy("permuted", permuted, numel * self._grad_dtype.itemsize, why)
        padded = [param for param in self._packed if param in self._large]
        numel = num_shards * sum(param.layout.param.shard_numel for param in padded)
        why = "rows do not divide evenly by the ranks, so the gradient is padded to send it"
        yield copy("padded", padded, numel * itemsize, why)
        small = [param for param in self._packed if param not in self._large]
        why = "one flag for each gradient tells the ranks whether any rank has it"
        if small:
            why = f"gradients too small to be worth a message share one, and {why}"
        yield copy("packed", small, (num_shards * self._numels[-1] - numel) * itemsize, why)
        if num_shards == 1:
            why = "no rank shares these parameters: gradients are copied into the all-reduce buffer"
            yield copy("moved", self._members, nbytes, why)
        if self._is_all_reduced and self._replica_dtype != self.dtype:
            wide = f"cast to {short(self._replica_dtype)} to be summed over the replicas"
            why = f"sums of {dtype} are {wide}, and rounded once"
            both = nbytes + sum(self._numels) * self._replica_dtype.itemsize
            yield copy("cast", self._members, both, why)
        finals, away = set(self._finals), is_away(self._members[0])
        changed = [
            (param, final)
            for param, final in zip(self._members, self._finals, strict=True)
            if away or final != self.dtype
        ]
        nbytes = sum(param.layout.param.shard_numel * final.itemsize for param, final in changed)
        if len(finals) == 1 and changed:  # all at once, with padding and flags
            nbytes = sum(self._numels) * self._finals[0].itemsize
        place = " and copied to the CPU, where the optimizer is" if away else ""
        turned = ", ".join(sorted(map(short, finals)))
        why = f"reduced gradients of {dtype} are turned into {turned}{place}"
        yield copy("moved" if away else "cast", self._members, nbytes, why)
