"""What one group sends, receives and keeps in a step, read off its buckets and reductions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.codec import Format, flatten, has_extension
from composable_shard.core.features.extension import ExtensionBucket
from composable_shard.core.features.grad_extension import num_tensors
from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import (
    BucketLayout,
    MessageCost,
    ParamLayout,
    is_packed,
    message_cost,
    message_numels,
    plan_bucket,
)
from composable_shard.core.program import reduced_together
from composable_shard.core.reduction import LocalReduction, final_grad_dtype, sent_dtype
from composable_shard.core.storage import Bucket, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import (
    CustomAllGather,
    CustomReduceScatter,
    sum_dtype,
)
from composable_shard.mesh import ShardMesh

# The plan of a group: plain values ----------------------------------------------------------------


class ParamPlan(NamedTuple):
    """How one parameter travels.

    Attributes:
        name: Its name in the model.
        layout: How it is cut; ``None`` for a tensor subclass.
        itemsize: Bytes of an element in the all-gather.
        sharded_nbytes: Bytes of the shard of one rank, padding included.
        gathered_nbytes: Bytes of the gathered parameter, padding included; ``None`` before a
            subclass has said what it sends.
        travels: How it is gathered; see ``ParameterExplanation``.
    """

    name: str
    layout: ParamLayout | None
    itemsize: int
    sharded_nbytes: int
    gathered_nbytes: int | None
    travels: str


@dataclass(frozen=True)
class GatherPlan:
    """The all-gather of a bucket of plain parameters.

    Attributes:
        names: The names of the parameters in the model.
        layout: Where each lies.
        stored_dtype: The dtype of their shards.
        dtype: The dtype of the unsharded parameters.
        is_away: Whether their shards are on another device than compute.
    """

    names: tuple[str, ...]
    layout: BucketLayout
    stored_dtype: torch.dtype
    dtype: torch.dtype
    is_away: bool

    @property
    def num_shards(self) -> int:
        """Ranks that share each parameter."""
        return self.layout.params[0].num_shards

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names in the order in which the parameters are registered."""
        return tuple(name for _, name in sorted(zip(self.layout.order, self.names, strict=True)))

    @property
    def is_cast(self) -> bool:
        """Whether shards are cast before they are sent."""
        return self.stored_dtype != self.dtype

    @property
    def shares_storage(self) -> bool:
        """Whether the unsharded parameters are the shards themselves."""
        return self.num_shards == 1 and not self.is_cast and not self.is_away

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of the shards of one rank, padding included."""
        return self.layout.shard_numel * self.stored_dtype.itemsize

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the shards as they are sent."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return 0 if self.shares_storage else self.layout.unsharded_numel * self.dtype.itemsize

    @property
    def staging_nbytes(self) -> int:
        """Bytes that are there only while a gather is under way, beside the gathered ones."""
        staged = self.sharded_nbytes if self.is_away and self.is_cast else 0
        if self.num_shards == 1:
            return staged
        if self.is_cast or self.is_away:
            staged += self.sent_nbytes
        return staged + self.num_shards * self.layout.packed_numel * self.dtype.itemsize

    @property
    def sent(self) -> tuple[int, ...] | None:
        """Bytes of each message that this rank sends to every other."""
        if self.num_shards == 1:
            return ()
        return tuple(numel * self.dtype.itemsize for _, numel in self.layout.message_spans)

    def params(self) -> Iterator[ParamPlan]:
        """Yield how each parameter travels."""
        for index, (name, layout) in enumerate(zip(self.names, self.layout.params, strict=True)):
            travels = "packed" if layout.gathers_in_place else "permuted"
            if layout.num_shards == 1 or index < self.layout.num_direct:
                travels = "in place" if layout.num_shards > 1 else "not at all"
            sharded = layout.shard_numel * self.stored_dtype.itemsize
            itemsize = self.dtype.itemsize
            gathered = layout.num_shards * layout.shard_numel * itemsize
            yield ParamPlan(name, layout, itemsize, sharded, gathered, travels)


@dataclass(frozen=True)
class SubclassPlan:
    """The all-gather of a tensor subclass.

    Attributes:
        name: Its parameter.
        sharded_nbytes: Bytes of the shard of this rank.
        sent: Bytes of each message; ``None`` before its hook was called at the first gather.
        num_shards: Number of ranks.
        has_hooks: Whether hooks of its class decide what travels.
    """

    name: str
    sharded_nbytes: int
    sent: tuple[int, ...] | None
    num_shards: int
    has_hooks: bool

    @property
    def unsharded_nbytes(self) -> int | None:
        """Bytes that arrive, of which a hook may make others."""
        return None if self.sent is None else self.num_shards * sum(self.sent)

    def params(self) -> Iterator[ParamPlan]:
        """Yield how the parameter travels."""
        nbytes = self.sharded_nbytes, self.unsharded_nbytes
        yield ParamPlan(self.name, None, 0, *nbytes, "as a subclass")


@dataclass(frozen=True)
class ReducePlan:
    """The reduction of some gradients of a bucket.

    Attributes:
        names: The names of the parameters, in the order of the messages.
        layouts: How each is cut. Those with their own message come first.
        num_direct: How many have their own message.
        dtype: The dtype of the reduction.
        grad_dtype: The dtype of the gradients that autograd makes.
        sent_dtype: The dtype of gradients that are sent in their own message.
        final_dtypes: The dtype of each in ``.grad``.
        replica_dtype: The dtype of sums over replicas.
        is_away: Whether ``.grad`` is on another device than compute.
        travel_alone: Of each, whether the parameter is gathered in its own message.
        is_alone: Whether the gradients are the result, without a reduction.
    """

    names: tuple[str, ...]
    layouts: tuple[ParamLayout, ...]
    num_direct: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    sent_dtype: torch.dtype
    final_dtypes: tuple[torch.dtype, ...]
    replica_dtype: torch.dtype
    is_away: bool
    travel_alone: tuple[bool, ...]
    is_alone: bool

    @property
    def message_numels(self) -> list[int]:
        """Elements of each message for one other rank; flags go last."""
        return message_numels(self.layouts, self.num_direct)

    @property
    def num_shards(self) -> int:
        """Ranks that share each parameter."""
        return self.layouts[0].num_shards

    @property
    def result_numel(self) -> int:
        """Elements of this rank's reduced gradients, and of one flag for each."""
        return sum(self.message_numels)

    @property
    def result_nbytes(self) -> int:
        """Bytes of this rank's reduced gradients and flags."""
        return self.result_numel * self.dtype.itemsize

    @property
    def is_widened(self) -> bool:
        """Whether the result is cast to be summed over replicas, and back."""
        return self.replica_dtype != self.dtype

    @property
    def all_reduced_nbytes(self) -> int:
        """Bytes of the result as it is summed over replicas."""
        return self.result_numel * self.replica_dtype.itemsize

    @property
    def scattered(self) -> tuple[int, ...]:
        """Bytes of each message for one other rank, summed in the dtype of the reduction."""
        return tuple(numel * self.dtype.itemsize for numel in self.message_numels)

    @property
    def packed_nbytes(self) -> int:
        """Bytes that are written to pack gradients and flags."""
        return self.num_shards * self.scattered[-1]

    @property
    def direct_numel(self) -> int:
        """Elements of the gradients with their own message."""
        return sum(param.numel for param in self.layouts[: self.num_direct])

    @property
    def is_cast(self) -> bool:
        """Whether gradients with their own message are cast to be sent."""
        return self.sent_dtype != self.grad_dtype

    @property
    def given_nbytes(self) -> int:
        """Bytes of the gradients that are sent from where autograd left them."""
        return 0 if self.is_cast else self.direct_numel * self.grad_dtype.itemsize

    @property
    def made_nbytes(self) -> int:
        """Bytes of what is made to be sent: packed and cast gradients, and flags."""
        cast = self.direct_numel * self.sent_dtype.itemsize if self.is_cast else 0
        return self.packed_nbytes + cast

    @property
    def final_nbytes(self) -> int:
        """Bytes of this rank's gradients in ``.grad``."""
        if len(set(self.final_dtypes)) == 1:
            return self.result_numel * self.final_dtypes[0].itemsize
        return sum(
            param.shard_numel * dtype.itemsize
            for param, dtype in zip(self.layouts, self.final_dtypes, strict=True)
        )


@dataclass(frozen=True)
class MeshPlan:
    """What goes over one mesh.

    Attributes:
        num_shards: Ranks that share each parameter.
        num_replicas: Ranks that hold the same shards.
        buckets: Plain parameters. Each bucket is gathered in its own launch.
        subclasses: Tensor subclasses.
        reductions: Reductions, each in its own launch.
        all_reduces: Whether reductions go on over the replicas.
        custom_gather: Whether the all-gather is the user's.
        custom_reduce: Whether the reduce-scatter is.
        is_alone: Whether gradients are the result, without a reduction.
    """

    num_shards: int
    num_replicas: int
    buckets: tuple[GatherPlan, ...]
    subclasses: tuple[SubclassPlan, ...]
    reductions: tuple[ReducePlan, ...]
    all_reduces: bool
    custom_gather: bool
    custom_reduce: bool
    is_alone: bool

    @property
    def gathers(self) -> tuple[GatherPlan | SubclassPlan, ...]:
        """All buckets."""
        return self.buckets + self.subclasses

    @property
    def all_reductions(self) -> tuple[ReducePlan, ...]:
        """The reductions that go on over the replicas."""
        return self.reductions if self.num_replicas > 1 and self.all_reduces else ()


class Residence(NamedTuple):
    """How long the unsharded parameters stay.

    Attributes:
        in_backward: How they come back for backward: ``"kept"``, ``"gathered"``, ``"regathered"``
            from neighbours, or ``"unread"``.
        why: The reason, a sentence.
        num_neighbours: From how many neighbours they are regathered.
    """

    in_backward: str
    why: str
    num_neighbours: int = 0


@dataclass(frozen=True)
class GroupPlan:
    """One group.

    Attributes:
        name: Its name; that of the root is empty.
        meshes: What goes over each mesh.
        residence: How long the unsharded parameters stay.
        is_reduced: Whether backward reduces gradients.
    """

    name: str
    meshes: tuple[MeshPlan, ...]
    residence: Residence
    is_reduced: bool

    @property
    def buckets(self) -> list[GatherPlan]:
        """The buckets of plain parameters, of all meshes."""
        return [bucket for mesh in self.meshes for bucket in mesh.buckets]

    @property
    def params(self) -> list[ParamPlan]:
        """How each parameter travels."""
        gathers = (unit for mesh in self.meshes for unit in mesh.gathers)
        return [param for unit in gathers for param in unit.params()]

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of the shards of one rank, padding included."""
        return sum(unit.sharded_nbytes for mesh in self.meshes for unit in mesh.gathers)

    @property
    def unsharded_nbytes(self) -> int | None:
        """Bytes of the gathered parameters; ``None`` before a subclass has said what it sends."""
        total = 0
        for mesh in self.meshes:
            for unit in mesh.gathers:
                if unit.unsharded_nbytes is None:
                    return None
                total += unit.unsharded_nbytes
        return total


# How long the unsharded parameters of a group stay, and why ---------------------------------------


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
            "unread", "backward does not come here: nothing before or in it is trained"
        )
    if reshard is None and group is group.tree.root:
        why = "it is the root, whose parameters backward needs first, so they are kept"
        return Residence("kept", why)
    if reshard is False:
        return Residence("kept", "reshard_after_forward=False keeps the parameters until backward")
    if _ends_forward_and_begins_backward(group):
        why = "it ends forward and opens backward, so from the second step on it is kept between"
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
    return Residence("regathered", why, reshard)


def _ends_forward_and_begins_backward(group: ParamGroup) -> bool:
    tree = group.tree
    if tree.plan.groups:
        return tree.tape.has_turned_at(tree.root, group)
    ran = [member for member in tree.groups if member.params]
    return group is ran[-1] and not any(_encloses(member, group) for member in ran[:-1])


def _encloses(outer: ParamGroup, inner: ParamGroup) -> bool:
    below = set(outer.all_modules())
    return any(module in below for module in inner.modules)


def _has_backward(group: ParamGroup) -> bool:
    if group.tree.plan.groups:
        return group in group.tree.plan.groups
    return any(_is_trained(param) for param in _before_the_end_of(group))


def _before_the_end_of(group: ParamGroup) -> Iterator[ShardedParam]:
    """Yield the parameters that are registered before a group ends, its own among them."""
    places = {module: place for place, module in enumerate(group.tree.root.all_modules())}
    end = max(places[module] for module in group.all_modules())
    for one in group.tree.groups:
        for param in one.params:
            if places[param.slots[0].module] <= end:
                yield param


def _is_trained(param: ShardedParam) -> bool:
    with _torch.without_overrides():
        return param.sharded.requires_grad


# Reading a plan off a group: nothing is sent, and the group stays as it is ------------------------

Names = Mapping[nn.Module, str]
"""Names of modules within the model that is looked at."""


class Elsewhere(NamedTuple):
    """Other ranks than those that a group is sharded over, to plan for.

    Attributes:
        num_shards: Ranks that share each parameter; one that is not shared stays so.
        num_replicas: Ranks that hold the same shards; a mesh without replicas stays so.
        num_neighbours: From how many parameters are regathered, where they are.
        is_accelerator: Whether compute is on another device than what is offloaded.
        backend: Which communicates, if it is known.
    """

    num_shards: int
    num_replicas: int
    num_neighbours: int
    is_accelerator: bool
    backend: str | None


def is_plain(group: ParamGroup) -> bool:
    """Return whether no parameter of a group is a tensor subclass."""
    return all(isinstance(bucket, Bucket) for bucket in group.buckets)


def full_name(param: ShardedParam, names: Names) -> str:
    """Return the name of a parameter in the model; that of the first place if it is tied."""
    slot = param.slots[0]
    prefix = names.get(slot.module, "")
    return f"{prefix}.{slot.name}" if prefix else slot.name


def read_group(
    group: ParamGroup, name: str, names: Names, elsewhere: Elsewhere | None = None
) -> GroupPlan:
    """Return the plan of a group.

    Args:
        group: The group.
        name: What to call it.
        names: How modules are called.
        elsewhere: The ranks to plan for, if not those that the group has.
    """
    residence = residence_of(group)
    if elsewhere is not None:
        residence = residence._replace(num_neighbours=elsewhere.num_neighbours)
    meshes = [_MeshReader(group, channel, names, elsewhere).plan() for channel in _channels(group)]
    return GroupPlan(name, tuple(meshes), residence, group.settings.reduce_grads)


def _channels(group: ParamGroup) -> list[Channel]:
    """Return the channels that carry parameters, or, of a group without any, all."""
    used = {bucket.mesh for bucket in group.buckets}
    return [channel for mesh, channel in group.channels.items() if mesh in used or not used]


class _MeshReader:
    """Reads what goes over one mesh, planned for its own ranks or for others."""

    def __init__(
        self, group: ParamGroup, channel: Channel, names: Names, elsewhere: Elsewhere | None
    ) -> None:
        self._group, self._channel, self._names = group, channel, names
        self._elsewhere, self._mesh = elsewhere, channel.mesh
        self._num_shards, self._num_replicas = self._mesh.num_shards, self._mesh.num_replicas
        self._is_accelerator = _torch.has_streams(self._mesh.device)
        if elsewhere is not None:
            self._num_shards = elsewhere.num_shards if self._mesh.num_shards > 1 else 1
            self._num_replicas = elsewhere.num_replicas if self._mesh.num_replicas > 1 else 1
            self._is_accelerator = elsewhere.is_accelerator

    def plan(self) -> MeshPlan:
        group, channel, mesh = self._group, self._channel, self._mesh
        buckets = [bucket for bucket in group.buckets if bucket.mesh == mesh]
        reductions = tuple(self._reductions(mesh))
        return MeshPlan(
            num_shards=self._num_shards,
            num_replicas=self._num_replicas,
            buckets=tuple(self._gather(one) for one in buckets if isinstance(one, Bucket)),
            subclasses=tuple(
                self._subclass(one) for one in buckets if isinstance(one, ExtensionBucket)
            ),
            reductions=reductions,
            all_reduces=group.settings.all_reduce_grads,
            custom_gather=isinstance(channel.all_gather, CustomAllGather),
            custom_reduce=isinstance(channel.reduce_scatter, CustomReduceScatter),
            is_alone=all(one.is_alone for one in reductions),
        )

    def _gather(self, bucket: Bucket) -> GatherPlan:
        params, layout = self._layout(bucket)
        names = tuple(full_name(param, self._names) for param in params)
        is_away = self._is_away(params)
        return GatherPlan(names, layout, bucket.dtype, bucket.compute_dtype, is_away)

    def _layout(self, bucket: Bucket) -> tuple[Sequence[ShardedParam], BucketLayout]:
        """Return where the parameters of a bucket lie, in the order of the layout."""
        if self._elsewhere is None:
            return bucket.params, bucket.layout
        itemsize = bucket.compute_dtype.itemsize
        layout = plan_bucket(
            tuple(self._over(param) for param in bucket.params),
            itemsize,
            self._cost(bucket),
            min(bucket.dtype.itemsize, itemsize),
        )
        return [bucket.params[index] for index in layout.order], layout

    def _cost(self, bucket: Bucket) -> MessageCost:
        if self._elsewhere is None:
            assert bucket.message_cost is not None
            return bucket.message_cost
        return message_cost(self._elsewhere.backend, is_aligned=self._is_accelerator)

    def _over(self, param: ShardedParam) -> ParamLayout:
        """Return how a parameter is cut over other ranks."""
        if param.layout.dim is None:  # a scalar is a row for each rank
            return ParamLayout((self._num_shards,), 0, self._num_shards)
        return replace(param.layout.param, num_shards=self._num_shards)

    def _is_away(self, params: Sequence[ShardedParam]) -> bool:
        return self._is_accelerator and params[0].offload is not None

    def _reductions(self, mesh: ShardMesh) -> Iterator[ReducePlan]:
        group = self._group
        trained = [p for p in group.params if _is_trained(p) or p.name in group.unsynced_names]
        for kind, buckets, reduced, dtype in reduced_together(group, trained):
            if buckets[0].mesh != mesh:
                continue
            own_message: set[ShardedParam] = set()
            ordered: list[ShardedParam] = []
            for bucket in buckets:
                planned: Sequence[ShardedParam] = bucket.params
                if isinstance(bucket, Bucket):
                    planned, cost = self._layout(bucket)[0], self._cost(bucket)
                    own_message.update(
                        param
                        for param in planned
                        if not is_packed(self._over(param), dtype.itemsize, cost)
                    )
                ordered += [param for param in planned if param in reduced]
            params = [param for param in ordered for _ in range(num_tensors(param))]
            direct = {param for param in own_message if self._over(param).is_even}
            params.sort(key=lambda param: param not in direct)
            yield ReducePlan(
                names=tuple(full_name(param, self._names) for param in params),
                layouts=tuple(map(self._over, params)),
                num_direct=sum(param in direct for param in params),
                dtype=dtype,
                grad_dtype=buckets[0].compute_dtype,
                sent_dtype=sent_dtype(buckets, dtype, self._channel),
                final_dtypes=tuple(final_grad_dtype(param, dtype) for param in params),
                replica_dtype=sum_dtype(dtype) if self._widens_over_replicas(dtype) else dtype,
                is_away=self._is_away(params),
                travel_alone=tuple(param in own_message for param in params),
                is_alone=kind is LocalReduction,
            )

    def _widens_over_replicas(self, dtype: torch.dtype) -> bool:
        if self._elsewhere is None:
            return self._channel.divides_over_replicas(dtype)
        return self._elsewhere.backend == "gloo"

    def _subclass(self, bucket: ExtensionBucket) -> SubclassPlan:
        local = bucket.param.local
        return SubclassPlan(
            name=full_name(bucket.param, self._names),
            sharded_nbytes=sum(leaf.numel() * leaf.itemsize for leaf in _torch.leaves(local)),
            sent=_sent_of(bucket),
            num_shards=bucket.mesh.num_shards,
            has_hooks=has_extension(local),
        )


def _sent_of(bucket: ExtensionBucket) -> tuple[int, ...] | None:
    """Return the bytes of each message of a subclass, as the ranks agreed, or will without hooks.

    Its own hook is not called: it may communicate, and may count its calls.
    """
    if bucket.mesh.num_shards == 1:
        return ()
    if bucket.formats is not None:
        return tuple(map(_padded_nbytes, zip(*bucket.formats, strict=True)))
    if has_extension(bucket.param.local):
        return None
    inner, _ = flatten([bucket.param.local])
    return tuple(bucket.param.layout.param.shard_numel * tensor.itemsize for tensor in inner)


def _padded_nbytes(formats: Sequence[Format]) -> int:
    """Return the bytes that each rank sends of a tensor, of which some have fewer rows."""
    rows = max(theirs.shape[0] for theirs in formats)
    return rows * prod(formats[0].shape[1:]) * formats[0].dtype.itemsize
