"""What one group sends, receives and keeps in a step, as its own layouts say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.bucket import GatherUnit, ParamBucket, fuses_on
from composable_shard.core.extension import ExtensionGather, Format, flatten, has_extension
from composable_shard.core.gradient_bucket import flags_travel_alone
from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import BucketLayout, ParamLayout, plan_bucket
from composable_shard.core.order import OrderRecord, stays_for_backward
from composable_shard.core.param import ShardedParam
from composable_shard.core.reduction_plan import ReductionPlan
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import CustomAllGather, CustomReduceScatter

# What one group sends, receives and keeps, as its own layouts say it ------------------------------


@dataclass(frozen=True)
class Members:
    """Some parameters that lie in one flat buffer.

    Attributes:
        names: Their names in the model.
        layout: Where each lies.
        scalars: Which of them are scalars, of which every rank holds one.
    """

    names: tuple[str, ...]
    layout: BucketLayout
    scalars: tuple[bool, ...]

    def over(self, num_shards: int, itemsize: int) -> Members:
        """Return the same parameters laid out for another number of ranks."""
        layouts = tuple(
            ParamLayout((num_shards,), 0, num_shards)
            if is_scalar
            else replace(layout, num_shards=num_shards)
            for layout, is_scalar in zip(self.layout.params, self.scalars, strict=True)
        )
        return replace(self, layout=plan_bucket(layouts, num_shards, itemsize))

    def named(self, indices: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of some of them."""
        return tuple(self.names[index] for index in indices)


@dataclass(frozen=True)
class GatherPlan:
    """A bucket of parameters that are gathered together.

    Attributes:
        members: The parameters.
        dtype: In which they are stored.
        compute_dtype: In which they travel and compute.
        crosses: Whether the shards are on another device than compute.
        offloads: Whether they are kept on the CPU.
        pads: Whether small ones are copied out by one kernel, the padding of some with them.
    """

    members: Members
    dtype: torch.dtype
    compute_dtype: torch.dtype
    crosses: bool
    offloads: bool
    pads: bool = False

    @property
    def layout(self) -> BucketLayout:
        """Where each parameter lies."""
        return self.members.layout

    @property
    def shares_storage(self) -> bool:
        """Whether the unsharded parameters are the shards themselves."""
        return self.layout.num_shards == 1 and self.dtype == self.compute_dtype and not self.crosses

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of the shards of one rank, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        if self.shares_storage:
            return 0
        return self.layout.unsharded_numel * self.compute_dtype.itemsize

    @property
    def packed_nbytes(self) -> int:
        """Bytes that are written to copy small parameters out of their message."""
        layout = self.layout
        packed = [layout.params[index] for index in layout.packed]
        numel = sum(param.num_nonempty_shards * param.shard_numel for param in packed)
        if self.pads:
            numel = layout.num_packed_shards * layout.packed_numel
        return numel * self.compute_dtype.itemsize

    @property
    def staging_nbytes(self) -> int:
        """Bytes that are there only while a gather is under way, beside the gathered ones."""
        if self.layout.num_shards == 1:
            return self.sharded_nbytes if self.crosses and self.dtype != self.compute_dtype else 0
        is_cast = self.dtype != self.compute_dtype
        numel = self.layout.staging_numel + self.layout.shard_numel * is_cast
        return numel * self.compute_dtype.itemsize + self.sharded_nbytes * self.crosses

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes of each message that this rank sends to every other."""
        if self.layout.num_shards == 1:
            return ()
        return tuple(numel * self.compute_dtype.itemsize for _, numel in self.layout.messages)

    def over(self, num_shards: int) -> GatherPlan:
        """Return the plan for another number of ranks."""
        return replace(self, members=self.members.over(num_shards, self.compute_dtype.itemsize))


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


@dataclass(frozen=True)
class ReducePlan:
    """A bucket of gradients that are reduced together.

    Attributes:
        members: Their parameters.
        dtype: In which they are summed.
        grad_dtypes: In which autograd makes each.
        final_dtypes: In which the optimizer finds each.
        crosses: Whether the reduced ones go to another device.
        widens: Whether the reduce-scatter takes narrower inputs.
        offloads: Whether the reduced ones are kept on the CPU.
        pads: Whether small ones are packed padding and all, by one kernel.
    """

    members: Members
    dtype: torch.dtype
    grad_dtypes: tuple[torch.dtype, ...]
    final_dtypes: tuple[torch.dtype, ...]
    crosses: bool
    widens: bool
    offloads: bool = False
    pads: bool = False

    @property
    def layout(self) -> BucketLayout:
        """Where each gradient lies."""
        return self.members.layout

    @property
    def result_numel(self) -> int:
        """Elements of this rank's reduced gradients, and one flag for each gradient."""
        return self.layout.shard_numel + len(self.members.names)

    @property
    def result_nbytes(self) -> int:
        """Bytes of this rank's reduced gradients, flags included."""
        return self.result_numel * self.dtype.itemsize

    @property
    def scattered(self) -> tuple[int, ...]:
        """Bytes of each message that this rank sends to every other; the flags go last."""
        layout = self.layout
        num_own = len(layout.direct) + len(layout.permuted)
        numels = [numel for _, numel in layout.messages[:num_own]]
        packed, flags = layout.packed_numel, len(self.members.names)
        numels += [n for n in (packed, flags) if n] if self.flags_are_alone else [packed + flags]
        return tuple(numel * self.dtype.itemsize for numel in numels)

    @property
    def packed_nbytes(self) -> int:
        """Bytes that are written to pack small gradients and the flags."""
        layout = self.layout
        numel = sum(layout.params[index].numel for index in layout.packed)
        if self.pads:
            numel = layout.num_shards * layout.packed_numel
        if not self.flags_are_alone:
            numel += layout.num_shards * len(self.members.names)
        return numel * self.dtype.itemsize

    @property
    def flags_are_alone(self) -> bool:
        """Whether the flags have a message of their own."""
        names = self.members.names
        return flags_travel_alone(self.layout.num_shards, len(names), self.dtype.itemsize)

    def goes_as_it_is(self, index: int) -> bool:
        """Tell whether a gradient is sent from where autograd left it."""
        layout, dtype = self.layout.params[index], self.grad_dtypes[index]
        fits = dtype == self.dtype
        if self.widens and not fits:
            fits = torch.promote_types(dtype, self.dtype) == self.dtype
        return fits and layout.is_even

    def input_nbytes(self, *, is_left_by_autograd: bool) -> int:
        """Return the bytes of what is sent and was left there by autograd, or else made for it."""
        layout = self.layout
        as_it_is = [index for index in layout.direct if self.goes_as_it_is(index)]
        if is_left_by_autograd:
            return sum(layout.params[i].numel * self.grad_dtypes[i].itemsize for i in as_it_is)
        made = {*layout.direct, *layout.permuted} - {*as_it_is}
        numel = sum(layout.params[index].gathered_numel for index in made)
        numel += layout.num_shards * (layout.packed_numel + len(self.members.names))
        return numel * self.dtype.itemsize

    @property
    def final_nbytes(self) -> int:
        """Bytes of this rank's gradients as the optimizer finds them."""
        finals = set(self.final_dtypes)
        if len(finals) == 1:
            return self.result_numel * next(iter(finals)).itemsize
        return sum(
            param.shard_numel * dtype.itemsize
            for param, dtype in zip(self.layout.params, self.final_dtypes, strict=True)
        )

    def over(self, num_shards: int) -> ReducePlan:
        """Return the plan for another number of ranks."""
        return replace(self, members=self.members.over(num_shards, self.dtype.itemsize))


@dataclass(frozen=True)
class MeshPlan:
    """What goes over one mesh.

    Attributes:
        num_shards: Ranks that share each parameter.
        num_replicas: Ranks that hold the same shards.
        gathers: What is gathered, in one launch.
        reductions: What is reduced, each in a launch of its own.
        all_reduces: Whether reductions go on over the replicas.
        custom_gather: Whether the all-gather is the user's.
        custom_reduce: Whether the reduce-scatter is.
        is_alone: Whether gradients are handed out without a reduction.
    """

    num_shards: int
    num_replicas: int
    gathers: tuple[GatherPlan | SubclassPlan, ...]
    reductions: tuple[ReducePlan, ...]
    all_reduces: bool = True
    custom_gather: bool = False
    custom_reduce: bool = False
    is_alone: bool = False

    def over(self, num_shards: int, num_replicas: int) -> MeshPlan:
        """Return the plan for longer axes, if all parameters are plain; one of 1 stays so."""
        shards = num_shards if self.num_shards > 1 else 1
        return replace(
            self,
            num_shards=shards,
            num_replicas=num_replicas if self.num_replicas > 1 else 1,
            gathers=tuple(unit.over(shards) for unit in self.buckets),
            reductions=tuple(one.over(shards) for one in self.reductions),
        )

    @property
    def buckets(self) -> tuple[GatherPlan, ...]:
        """The gathers of plain parameters."""
        return tuple(unit for unit in self.gathers if isinstance(unit, GatherPlan))

    @property
    def subclasses(self) -> tuple[SubclassPlan, ...]:
        """The gathers of tensor subclasses."""
        return tuple(unit for unit in self.gathers if isinstance(unit, SubclassPlan))


@dataclass(frozen=True)
class Residence:
    """How long the unsharded parameters stay.

    Attributes:
        in_backward: How they come back for backward: ``"kept"``, ``"gathered"``, ``"regathered"``
            from neighbours, or ``"unread"``.
        num_neighbours: From how many neighbours they are regathered.
        why: The reason, a sentence.
    """

    in_backward: str
    num_neighbours: int
    why: str


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

    def over(self, num_shards: int, num_replicas: int, num_neighbours: int) -> GroupPlan:
        """Return the plan for another number of ranks, if all parameters are plain.

        Args:
            num_shards: Ranks that share each parameter.
            num_replicas: Ranks that hold the same shards.
            num_neighbours: From how many they are regathered, where they are.
        """
        return replace(
            self,
            meshes=tuple(mesh.over(num_shards, num_replicas) for mesh in self.meshes),
            residence=replace(self.residence, num_neighbours=num_neighbours),
        )

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
    settings, context = group.settings, group.context
    if not group.params or not settings.unshards_in_backward:
        why = "nothing is gathered" if not group.params else "set_unshard_in_backward(False)"
        return Residence("unread", 0, f"backward reads no parameters of this group: {why}")
    if not _has_backward(group):
        return Residence(
            "unread", 0, "backward does not come here: nothing before or in it is trained"
        )
    reshard = settings.reshard_after_forward
    if reshard is None:
        if group is context.root:
            return Residence(
                "kept", 0, "it is the root, whose parameters backward needs first, so they are kept"
            )
        reshard = True
    if not reshard:
        return Residence(
            "kept", 0, "reshard_after_forward=False keeps the parameters until backward"
        )
    if _ends_forward_and_opens_backward(group):
        return Residence(
            "kept",
            0,
            "it ends forward and opens backward, so from the second step on it is kept between",
        )
    if isinstance(reshard, bool):
        why = "the parameters are freed after forward and gathered again for backward"
        if settings.keeps_unsharded_storage:
            why = "the parameters are gathered again for backward, into memory that is kept"
        return Residence("gathered", 0, why)
    return Residence(
        "regathered",
        reshard,
        f"after forward each of {reshard} neighbours keeps a part of all parameters, from which "
        "backward gathers them again",
    )


def _ends_forward_and_opens_backward(group: ParamGroup) -> bool:
    forward, backward = OrderRecord[ParamGroup](), OrderRecord[ParamGroup]()
    forward.recorded = group.context.forward.recorded(group.context.root)
    backward.recorded = group.context.backward.record.recorded
    if not forward.recorded or not backward.recorded:
        forward.recorded = tuple(_with_params(group))
        backward.recorded = _opening_backward(group)
    return stays_for_backward(group, forward, backward)


def _with_params(group: ParamGroup) -> list[ParamGroup]:
    return [member for member in group.context.groups if member.params]


def _opening_backward(group: ParamGroup) -> tuple[ParamGroup, ...]:
    """Return whom the first gradient reaches: the outermost group around the one that ran last."""
    ran = _with_params(group)
    last = ran[-1]
    around = [one for one in ran if one is last or group.context.encloses(one, last)]
    return tuple(around[:1])


def _has_backward(group: ParamGroup) -> bool:
    recorded = group.context.backward.record.recorded
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


def read_group(group: ParamGroup, name: str, names: Names) -> GroupPlan:
    """Return the plan of a group.

    Args:
        group: The group.
        name: What to call it.
        names: How modules are called.
    """
    plans = group.gradients.next_plans()
    return GroupPlan(
        name,
        tuple(
            _read_mesh(group, channel, some, names)
            for channel, some in zip(group.channels.values(), plans, strict=True)
        ),
        residence_of(group),
        group.settings.requires_gradient_sync,
    )


def full_name(param: ShardedParam, names: Names) -> str:
    """Return the name of a parameter in the model; that of the first place if it is tied."""
    module, attribute, _ = param.slots[0]
    prefix = names.get(module, "")
    return f"{prefix}.{attribute}" if prefix else attribute


def _read_mesh(
    group: ParamGroup, channel: Channel, plans: Sequence[ReductionPlan], names: Names
) -> MeshPlan:
    mesh = channel.mesh
    widens = channel.reduce_scatter.widens
    return MeshPlan(
        num_shards=mesh.num_shards,
        num_replicas=mesh.num_replicas,
        gathers=tuple(_read_unit(unit, names) for unit in group.units.members if unit.mesh == mesh),
        reductions=tuple(_read_reduction(plan, names, widens=widens) for plan in plans),
        all_reduces=group.settings.reduction.all_reduces,
        custom_gather=isinstance(channel.all_gather, CustomAllGather),
        custom_reduce=isinstance(channel.reduce_scatter, CustomReduceScatter),
        is_alone=mesh.num_ranks == 1 and group.settings.reduction.hook is None,
    )


def _read_unit(unit: GatherUnit, names: Names) -> GatherPlan | SubclassPlan:
    if isinstance(unit, ParamBucket):
        first = unit.params[0]
        return GatherPlan(
            members=_members(unit.params, unit.layout, names),
            dtype=unit.sharded.dtype,
            compute_dtype=first.policy.compute_dtype(unit.sharded.dtype),
            crosses=unit.sharded.device.type not in ("meta", unit.mesh.device.type),
            offloads=first.offload is not None,
            pads=fuses_on(unit.mesh.device),
        )
    assert isinstance(unit, ExtensionGather), unit
    local = unit.param.local
    return SubclassPlan(
        name=full_name(unit.param, names),
        sharded_nbytes=sum(leaf.numel() * leaf.itemsize for leaf in _torch.leaves(local)),
        sent=_sent_of(unit),
        num_shards=unit.mesh.num_shards,
        has_hooks=has_extension(local),
    )


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


def _read_reduction(plan: ReductionPlan, names: Names, *, widens: bool) -> ReducePlan:
    params = [param for param, _ in plan.members]
    return ReducePlan(
        members=_members(params, plan.bucket.layout, names),
        dtype=plan.bucket.dtype,
        grad_dtypes=tuple(param.compute_dtype for param in params),
        final_dtypes=tuple(plan.grad_dtypes()),
        crosses=any(param.device != param.mesh.device for param in params),
        widens=widens,
        offloads=any(param.offload is not None for param in params),
        pads=any(param.mesh.device.type != "cpu" for param in params),
    )


def _members(params: Sequence[ShardedParam], layout: BucketLayout, names: Names) -> Members:
    return Members(
        tuple(full_name(param, names) for param in params),
        layout,
        tuple(param.form.is_replicated for param in params),
    )
