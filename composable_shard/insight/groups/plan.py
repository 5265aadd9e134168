"""What one group sends, receives and keeps, as its own layouts say it.

A plan is taken from a sharded model (:mod:`read`), and can be drawn for another number of ranks
without any of them: layouts are arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from composable_shard.core.grads.packing import flags_travel_alone
from composable_shard.core.params.layout import BucketLayout, ParamLayout, plan_bucket


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
