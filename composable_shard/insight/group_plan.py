"""What one group sends, receives and keeps in a step, as its own layouts say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.bucket import ParamBucket
from composable_shard.core.codec import Format, flatten, has_extension
from composable_shard.core.gather_extension import ExtensionGather
from composable_shard.core.gradient_bucket import (
    flags_travel_alone,
    goes_as_it_is,
    packed_numels,
    scratch_places,
)
from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import (
    BucketLayout,
    Packing,
    ParamLayout,
    packing_of,
    plan_bucket,
)
from composable_shard.core.order import stays_for_backward
from composable_shard.core.param import ShardedParam
from composable_shard.core.reduction_plan import ReductionPlan, narrowest_itemsize
from composable_shard.core.root import context_of
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import (
    CustomAllGather,
    CustomReduceScatter,
    sum_dtype,
)

# What one group sends, receives and keeps, as its own layouts say it ------------------------------


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
class BucketPlan:
    """Parameters, or their gradients, that lie in one flat buffer.

    Attributes:
        names: The names of the parameters in the model.
        layout: Where each lies.
        dtype: In which they travel.
        is_away: Whether their shards are kept on another device than compute.
        fuses: Whether one kernel copies all small ones, padding and all.
    """

    names: tuple[str, ...]
    layout: BucketLayout
    dtype: torch.dtype
    is_away: bool
    fuses: bool

    def named(self, indices: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of some of them."""
        return tuple(self.names[index] for index in indices)


@dataclass(frozen=True)
class GatherPlan(BucketPlan):
    """A bucket of parameters that are gathered together.

    Attributes:
        stored_dtype: In which their shards are stored.
    """

    stored_dtype: torch.dtype

    @property
    def is_cast(self) -> bool:
        """Whether shards are cast before they are sent."""
        return self.stored_dtype != self.dtype

    @property
    def shares_storage(self) -> bool:
        """Whether the unsharded parameters are the shards themselves."""
        return self.layout.num_shards == 1 and not self.is_cast and not self.is_away

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of the shards of one rank, padding included."""
        return self.layout.shard_numel * self.stored_dtype.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return 0 if self.shares_storage else self.layout.unsharded_numel * self.dtype.itemsize

    @property
    def packed_nbytes(self) -> int:
        """Bytes that are written to copy small parameters out of their message."""
        layout = self.layout
        packed = [layout.params[index] for index in layout.packed]
        numel = sum(param.num_nonempty_shards * param.shard_numel for param in packed)
        if self.fuses:  # padding is written to be dropped
            numel = layout.num_packed_shards * layout.packed_numel
        return numel * self.dtype.itemsize

    @property
    def staging_nbytes(self) -> int:
        """Bytes that are there only while a gather is under way, beside the gathered ones."""
        if self.layout.num_shards == 1:
            return self.sharded_nbytes if self.is_away and self.is_cast else 0
        numel = self.layout.staging_numel + self.layout.shard_numel * self.is_cast
        return numel * self.dtype.itemsize + self.sharded_nbytes * self.is_away

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes of each message that this rank sends to every other."""
        if self.layout.num_shards == 1:
            return ()
        return tuple(numel * self.dtype.itemsize for _, numel in self.layout.messages)

    def params(self) -> Iterator[ParamPlan]:
        """Yield how each parameter travels."""
        itemsize = self.dtype.itemsize
        for index, (name, layout) in enumerate(zip(self.names, self.layout.params, strict=True)):
            sharded = layout.shard_numel * self.stored_dtype.itemsize
            gathered = layout.gathered_numel * itemsize
            yield ParamPlan(name, layout, itemsize, sharded, gathered, self._way_of(index))

    def _way_of(self, index: int) -> str:
        if self.layout.num_shards == 1:
            return "not at all"
        if index in self.layout.packed:
            return "packed"
        return "permuted" if index in self.layout.permuted else "in place"


@dataclass(frozen=True)
class SubclassPlan:
    """A tensor subclass, gathered by itself.

    Attributes:
        name: Its parameter.
        sharded_nbytes: Bytes of the shard of this rank.
        sent: Bytes of each message; ``None`` before its hook was asked at the first gather.
        num_shards: Number of ranks.
        has_hooks: Whether it says by hooks of its own what travels.
    """

    name: str
    sharded_nbytes: int
    sent: tuple[int, ...] | None
    num_shards: int
    has_hooks: bool

    @property
    def unsharded_nbytes(self) -> int | None:
        """Bytes that arrive; what a hook makes of them is its own business."""
        return None if self.sent is None else self.num_shards * sum(self.sent)

    def params(self) -> Iterator[ParamPlan]:
        """Yield how the parameter travels."""
        nbytes = self.sharded_nbytes, self.unsharded_nbytes
        yield ParamPlan(self.name, None, 0, *nbytes, "as a subclass")


@dataclass(frozen=True)
class ReducePlan(BucketPlan):
    """A bucket of gradients that are reduced together.

    Attributes:
        grad_dtypes: In which autograd makes each.
        final_dtypes: In which the optimizer finds each.
        replica_dtype: In which they are summed over replicas.
        widens: Whether the reduce-scatter takes narrower inputs.
        reads_padding: Whether it looks at padding, which is written for it.
    """

    grad_dtypes: tuple[torch.dtype, ...]
    final_dtypes: tuple[torch.dtype, ...]
    replica_dtype: torch.dtype
    widens: bool
    reads_padding: bool

    @property
    def result_numel(self) -> int:
        """Elements of this rank's reduced gradients, and one flag for each; padding included."""
        return self.layout.shard_numel + self.num_flag_columns

    @property
    def num_flag_columns(self) -> int:
        """Elements of one flag for each gradient, padding included."""
        return self.layout.aligned(len(self.names))

    @property
    def result_nbytes(self) -> int:
        """Bytes of this rank's reduced gradients, flags included."""
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
        """Bytes of each message that this rank sends to every other; the flags go last."""
        layout = self.layout
        num_own = len(layout.direct) + len(layout.permuted)
        numels = [numel for _, numel in layout.messages[:num_own]]
        numels += packed_numels(layout, len(self.names), self.dtype.itemsize)
        return tuple(numel * self.dtype.itemsize for numel in numels)

    @property
    def packed_nbytes(self) -> int:
        """Bytes that are written to pack small gradients and the flags."""
        layout = self.layout
        numel = sum(layout.params[index].numel for index in layout.packed)
        if self.fuses:
            numel = layout.num_shards * layout.packed_numel
        if not self.flags_are_alone:
            numel += layout.num_shards * self.num_flag_columns
        return numel * self.dtype.itemsize

    @property
    def flags_are_alone(self) -> bool:
        """Whether the flags have a message of their own."""
        return flags_travel_alone(self.layout, len(self.names), self.dtype.itemsize)

    def goes_as_it_is(self, index: int) -> bool:
        """Tell whether a gradient is sent from where autograd left it."""
        layout, dtype = self.layout.params[index], self.grad_dtypes[index]
        return goes_as_it_is(layout, dtype, self.dtype, widens=self.widens)

    @property
    def given_nbytes(self) -> int:
        """Bytes of the gradients that are sent from where autograd left them."""
        direct = [index for index in self.layout.direct if self.goes_as_it_is(index)]
        params = self.layout.params
        return sum(params[index].numel * self.grad_dtypes[index].itemsize for index in direct)

    @property
    def made_nbytes(self) -> int:
        """Bytes of what is made to be sent: copies of the other gradients, and the flags."""
        layout = self.layout
        numel = layout.num_shards * (layout.packed_numel + self.num_flag_columns)
        copied = [
            layout.params[index]
            for index in (*layout.direct, *layout.permuted)
            if index in layout.permuted or not self.goes_as_it_is(index)
        ]
        _, scratch_numel = scratch_places(copied, self.dtype.itemsize)
        return (numel + scratch_numel) * self.dtype.itemsize

    @property
    def final_nbytes(self) -> int:
        """Bytes of this rank's gradients as the optimizer finds them."""
        if len(set(self.final_dtypes)) == 1:
            return self.result_numel * self.final_dtypes[0].itemsize
        return sum(
            param.shard_numel * dtype.itemsize
            for param, dtype in zip(self.layout.params, self.final_dtypes, strict=True)
        )


@dataclass(frozen=True)
class MeshPlan:
    """What goes over one mesh.

    Attributes:
        num_shards: Ranks that share each parameter.
        num_replicas: Ranks that hold the same shards.
        buckets: Plain parameters, gathered in one launch with the subclasses.
        subclasses: Tensor subclasses.
        reductions: What is reduced, each in a launch of its own.
        all_reduces: Whether reductions go on over the replicas.
        custom_gather: Whether the all-gather is the user's.
        custom_reduce: Whether the reduce-scatter is.
        is_alone: Whether gradients are handed out without a reduction.
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
        """What is gathered."""
        return self.buckets + self.subclasses

    @property
    def all_reductions(self) -> tuple[ReducePlan, ...]:
        """What is reduced over the replicas."""
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
        """Bytes of the gathered parameters; ``None`` where a hook has not said it yet."""
        total = 0
        for mesh in self.meshes:
            for unit in mesh.gathers:
                if unit.unsharded_nbytes is None:
                    return None
                total += unit.unsharded_nbytes
        return total


# How long the unsharded parameters of a group stay, and why ---------------------------------------


def residence_of(group: ParamGroup) -> Residence:
    """Tell how the parameters of a group come back for backward.

    What the passes have recorded decides. Before the first one, it is taken that groups run in the
    order in which they are registered.
    """
    settings = group.settings
    reshard = settings.reshard_after_forward
    if not group.params:
        return Residence("unread", "backward reads no parameters of this group: it has none")
    if not settings.unshards_in_backward:
        return Residence("unread", "set_unshard_in_backward(False): backward gathers nothing")
    if not _has_backward(group):
        return Residence(
            "unread", "backward does not come here: nothing before or in it is trained"
        )
    if reshard is None and group is group.context.root:
        why = "it is the root, whose parameters backward needs first, so they are kept"
        return Residence("kept", why)
    if reshard is False:
        return Residence("kept", "reshard_after_forward=False keeps the parameters until backward")
    if _ends_forward_and_opens_backward(group):
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


def _ends_forward_and_opens_backward(group: ParamGroup) -> bool:
    context = context_of(group)
    if context.root.settings.reshard_after_forward is not None:
        return False
    forward, backward = context.order.of_forward(context.root), context.order.of_backward
    if forward.recorded and backward.recorded:
        return stays_for_backward(group, forward, backward)
    ran = [member for member in context.groups if member.params]
    return group is ran[-1] and not any(_encloses(member, group) for member in ran[:-1])


def _encloses(outer: ParamGroup, inner: ParamGroup) -> bool:
    """Tell whether modules of ``inner`` lie within those of ``outer``."""
    below = {module for top in outer.modules for module in top.modules()}
    return any(module in below for module in inner.modules)


def _has_backward(group: ParamGroup) -> bool:
    recorded = context_of(group).order.of_backward.recorded
    if recorded:
        return group in recorded
    return any(_is_trained(param) for param in _before_the_end_of(group))


def _before_the_end_of(group: ParamGroup) -> Iterator[ShardedParam]:
    """Yield the parameters that are registered before a group ends, its own among them."""
    context = group.context
    modules = [module for top in context.root.modules for module in top.modules()]
    places = {module: place for place, module in enumerate(modules)}
    end = max(places[module] for top in group.modules for module in top.modules())
    for one in context.groups:
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
    return all(isinstance(unit, ParamBucket) for unit in group.units.members)


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
    plans = zip(group.channels.values(), group.gradients.next_plans(), strict=True)
    meshes = [_MeshReader(group, channel, names, elsewhere).plan(some) for channel, some in plans]
    return GroupPlan(name, tuple(meshes), residence, group.settings.requires_gradient_sync)


def full_name(param: ShardedParam, names: Names) -> str:
    """Return the name of a parameter in the model; that of the first place if it is tied."""
    module, attribute, _ = param.slots[0]
    prefix = names.get(module, "")
    return f"{prefix}.{attribute}" if prefix else attribute


class _MeshReader:
    """Reads what goes over one mesh, planned for its own ranks or for others."""

    def __init__(
        self, group: ParamGroup, channel: Channel, names: Names, elsewhere: Elsewhere | None
    ) -> None:
        mesh = channel.mesh
        self._group, self._channel, self._names = group, channel, names
        self._num_shards, self._num_replicas = mesh.num_shards, mesh.num_replicas
        self._elsewhere = elsewhere
        self._packing: Packing | None = None
        self._is_accelerator = _torch.has_streams(mesh.device)
        if elsewhere is not None:
            self._num_shards = elsewhere.num_shards if mesh.num_shards > 1 else 1
            self._num_replicas = elsewhere.num_replicas if mesh.num_replicas > 1 else 1
            self._is_accelerator = elsewhere.is_accelerator
            self._packing = packing_of(elsewhere.backend, is_aligned=self._is_accelerator)

    def plan(self, reductions: Sequence[ReductionPlan]) -> MeshPlan:
        mesh, reduction = self._channel.mesh, self._group.settings.reduction
        units = [unit for unit in self._group.units.members if unit.mesh == mesh]
        return MeshPlan(
            num_shards=self._num_shards,
            num_replicas=self._num_replicas,
            buckets=tuple(self._bucket(unit) for unit in units if isinstance(unit, ParamBucket)),
            subclasses=tuple(
                self._subclass(unit) for unit in units if isinstance(unit, ExtensionGather)
            ),
            reductions=tuple(map(self._reduction, reductions)),
            all_reduces=reduction.all_reduces,
            custom_gather=isinstance(self._channel.all_gather, CustomAllGather),
            custom_reduce=isinstance(self._channel.reduce_scatter, CustomReduceScatter),
            is_alone=mesh.num_ranks == 1 and reduction.hook is None,
        )

    def _bucket(self, bucket: ParamBucket) -> GatherPlan:
        stored = bucket.sharded.dtype
        dtype = bucket.params[0].policy.compute_dtype(stored)
        narrowest = min(stored.itemsize, dtype.itemsize)
        common = self._common(bucket.params, bucket.layout, dtype, narrowest)
        return GatherPlan(*common, self._is_accelerator, stored)

    def _reduction(self, plan: ReductionPlan) -> ReducePlan:
        params, dtype = [param for param, _ in plan.members], plan.bucket.dtype
        return ReducePlan(
            *self._common(params, plan.bucket.layout, dtype, narrowest_itemsize(params, dtype)),
            fuses=self._is_accelerator,
            grad_dtypes=tuple(param.compute_dtype for param in params),
            final_dtypes=tuple(plan.grad_dtypes()),
            replica_dtype=sum_dtype(dtype) if self._widens_over_replicas(dtype) else dtype,
            widens=self._channel.reduce_scatter.widens,
            reads_padding=self._is_accelerator or self._channel.reduce_scatter.reads_padding,
        )

    def _widens_over_replicas(self, dtype: torch.dtype) -> bool:
        if self._elsewhere is None:
            return self._channel.divides_over_replicas(dtype)
        return self._elsewhere.backend == "gloo"  # see there

    def _common(
        self,
        params: Sequence[ShardedParam],
        layout: BucketLayout,
        dtype: torch.dtype,
        narrowest_itemsize: int,
    ) -> tuple[tuple[str, ...], BucketLayout, torch.dtype, bool]:
        """Return what :class:`BucketPlan` begins with."""
        names = tuple(full_name(param, self._names) for param in params)
        if self._packing is not None:
            layouts = tuple(_over(param, self._num_shards) for param in params)
            layout = plan_bucket(
                layouts, self._num_shards, dtype.itemsize, self._packing, narrowest_itemsize
            )
        is_away = self._is_accelerator and any(param.offload is not None for param in params)
        return names, layout, dtype, is_away

    def _subclass(self, unit: ExtensionGather) -> SubclassPlan:
        local = unit.param.local
        return SubclassPlan(
            name=full_name(unit.param, self._names),
            sharded_nbytes=sum(leaf.numel() * leaf.itemsize for leaf in _torch.leaves(local)),
            sent=_sent_of(unit),
            num_shards=unit.mesh.num_shards,
            has_hooks=has_extension(local),
        )


def _over(param: ShardedParam, num_shards: int) -> ParamLayout:
    """Return how a parameter is cut over another number of ranks."""
    if param.form.is_replicated:
        return ParamLayout((num_shards,), 0, num_shards)
    return replace(param.layout, num_shards=num_shards)


def _sent_of(unit: ExtensionGather) -> tuple[int, ...] | None:
    """Return the bytes of each message of a subclass, as the ranks agreed, or will without hooks.

    Its own hook is not called: it may communicate, and may count its calls.
    """
    if unit.mesh.num_shards == 1:
        return ()
    if unit.formats is not None:
        return tuple(map(_padded_nbytes, zip(*unit.formats, strict=True)))
    if has_extension(unit.param.local):
        return None
    layout = unit.param.layout
    inner, _ = flatten([unit.param.local])
    return tuple(layout.shard_numel * tensor.itemsize for tensor in inner)


def _padded_nbytes(formats: Sequence[Format]) -> int:
    """Return the bytes that each rank sends of a tensor, of which some have fewer rows."""
    rows = max(theirs.shape[0] for theirs in formats)
    return rows * prod(formats[0].shape[1:]) * formats[0].dtype.itemsize
