"""Shards that are split over the replicas of a hybrid mesh: ``sharding="hybrid"``.

Only plain parameters can be split. Each rank has two layouts of a parameter::

    whole parameter              r0 r1 r2 r3 r4 r5 r6 r7
    shards, over the axis shard  r0 r1 r2 r3 | r4 r5 r6 r7
    parts, over both axes        r0 r1 | r2 r3 | r4 r5 | r6 r7     two replicas

Users, optimizers and checkpoints see the parts. Modules compute with parameters that are gathered
from the shards, as on any mesh. Once in a step, the parts are gathered over the replicas into the
shards (`PartBucket`). Each backward reduces gradients over the shards. Once in a step, these are
reduced over the replicas, so that each rank has the gradient rows of its part (`PartReduction`). An
ordinary `FlatBucket` and an ordinary `Reduction` communicate over the replicas: they treat a shard
as a whole parameter, and its parts as the shards (`_View`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter, is_
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable_shard import _torch
from composable_shard.core.codec import needs_extension
from composable_shard.core.group import ParamGroup, State
from composable_shard.core.placement import TensorLayout, plan_tensor
from composable_shard.core.plugins import Feature, Op, Phase
from composable_shard.core.reduction import Reduction, redistributed_grad, stage_of
from composable_shard.core.storage import Bucket, FlatBucket, GatherOps, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import Tensors
from composable_shard.core.transport.pending import Pending, launching_stream, on_side_stream
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh, shard_mesh_of

_version = attrgetter("_version")


# The plan of the parameters -----------------------------------------------------------------------


class PartMesh(ShardMesh):
    """A hybrid mesh on which the replicas of a shard hold different parts of that shard."""

    @property
    def channel_meshes(self) -> tuple[ShardMesh, ...]:
        """The meshes that each have a `Channel`."""
        return self, self.over_replicas

    @cached_property
    def over_replicas(self) -> ShardMesh:
        """The replicas of this rank's shard, as a 1-D mesh that splits the shard."""
        axes: Any = self.mesh.mesh_dim_names
        return shard_mesh_of(self.mesh[axes[0]], 0)


@dataclass(frozen=True)
class _SplitLayout(TensorLayout):
    """The layout of a parameter over the shards, and of this rank's shard over the replicas."""

    part: TensorLayout
    replica_rank: int

    def shard_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View this rank's part of the shard of ``rank`` in a whole tensor."""
        return self.part.shard_of(super().shard_of(tensor, rank), self.replica_rank)


def split_shards(planned: Mapping[nn.Parameter, ShardedParam], whole: ShardMesh) -> ShardMesh:
    """Split the shards of the parameters on a hybrid mesh over its replicas; return the new mesh.

    Raises:
        ValueError: If ``whole`` is not a hybrid mesh, or one of these parameters is a DTensor or a
            tensor subclass that is sent as other tensors, is offloaded, or has a wire format.
    """
    if whole.shard_group is None or whole.replica_group is None:
        raise ValueError(
            "Expected a mesh of 2 axes (replicate, shard) with sharding='hybrid', got "
            f"{whole.mesh}; pass such a mesh, or another sharding"
        )
    if whole.num_replicas == 1:
        return whole
    mesh = PartMesh(**vars(whole))
    for original, param in planned.items():
        if param.mesh is not whole:
            continue
        _check_plain(param, original)
        layout, dim, param.mesh = param.layout, param.layout.dim, mesh
        over, memory = mesh.over_replicas, torch.empty(layout.flat.numel, device="meta")
        part = plan_tensor(layout.local(memory, mesh.shard_rank), dim, over.num_shards)
        param.layout = _SplitLayout(**vars(layout), part=part, replica_rank=over.shard_rank)
        if dim is not None:
            cut = Shard(dim) if mesh.num_shards == 1 else _torch.strided_shard(dim, mesh.num_shards)
            (_, role), *others = param.placement.axes
            param.placement = replace(param.placement, axes=((cut, role), *others))
        param.bucket_class = PartBucket
    return mesh


def _check_plain(param: ShardedParam, original: nn.Parameter) -> None:
    reasons = {
        "a DTensor": param.placement.unsharded_spec is not None,
        "a tensor subclass that is sent as other tensors": needs_extension(original),
        "one that offload_policy keeps on the CPU": param.offload is not None,
        "one with gather_wire or reduce_wire": param.bucket_class is not None,
    }
    if any(reasons.values()):
        raise ValueError(
            f"Expected parameter '{param.name}' to be a plain tensor on the compute device with "
            "sharding='hybrid', got "
            f"{next(filter(reasons.get, reasons))}; choose another sharding for its module"
        )


class _View(ShardedParam):
    """A parameter in the collectives over the replicas, which gather its shard from its parts.

    There, the shard counts as the whole parameter, and the part of a rank as its shard.
    """

    def __init__(self, param: ShardedParam) -> None:
        self.param, self.mesh = param, cast(PartMesh, param.mesh).over_replicas
        self.layout = cast(_SplitLayout, param.layout).part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.param, name)

    def create_unsharded(self, tensor: torch.Tensor) -> None:
        """Keep the tensor into which the replicas gather the shard."""
        self.shard = tensor


# Gathers ------------------------------------------------------------------------------------------


class PartBucket(FlatBucket):
    """A bucket of shards that are gathered from the parts of the replicas.

    Attributes:
        gathered_version: The version of the parts at the last gather over the replicas: a number
            that changes with every detected change. ``None`` lets the next use gather again.
        views: The `_View` of each parameter.
        parts: The bucket that gathers the parts over the replicas.
        sharded: This rank's shards [shard_numel] in the compute dtype.
        locals: The part of each parameter, a view of the buffer of ``parts``.
    """

    def __init__(self, params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> None:
        views = {param: _View(param) for param in params}
        self.parts = FlatBucket([*views.values()], shards)
        zero = self.parts.sharded.new_zeros((), dtype=self.parts.compute_dtype)
        super().__init__(params, [zero.expand(view.layout.shape) for view in views.values()])
        self.views, self._shards = [views[param] for param in self.params], self.locals
        of_view = dict(zip(self.parts.params, self.parts.locals, strict=True))
        self.locals = [of_view[view] for view in self.views]
        for param, view in zip(self.params, self.views, strict=True):
            param.flat_position, param.shares_storage = view.flat_position, False
        self._sources: list[torch.Tensor] = []
        self.gathered_version: int | None = None
        self._is_in_flight = False
        self.reduction = PartReduction

    def create_unsharded(self, channel: Channel) -> None:
        """Make the unsharded parameters, and the memory for the gather over the replicas."""
        self._group: ParamGroup = self.params[0].group
        self.parts.create_unsharded(self._group.channels[self.parts.mesh])
        super().create_unsharded(channel)
        if GATHER_PARTS not in self._group.tree.features:
            self._group.tree.install(GATHER_PARTS)

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather the shards, and before that the parts if changed."""
        if not (self._sources and all(map(is_, shards, self._sources))):
            self._drop()
            self._sources = list(shards)
            of_view = dict(zip(self.views, shards, strict=True))
            sources = [of_view[cast(_View, view)] for view in self.parts.params]
            over = self._group.channels[self.parts.mesh]
            ops = self.parts.gather_ops(sources, over, keeps_storage=False)
            gathered = [view.shard for view in self.views]
            fill: Op = partial(_torch.copy_all_, self._shards, gathered)
            wait, drop = (*ops.wait, fill, *ops.free), (*ops.drop, *ops.free)
            self._over = ops._replace(wait=wait, drop=drop)
        parts, self.locals = self.locals, self._shards  # the gather sends them without a copy
        ops = super().gather_ops(self._shards, channel, keeps_storage=keeps_storage)
        self.locals = parts
        return ops._replace(launch=(self._gather_parts, *ops.launch))

    def launch(self, *, is_anew: bool) -> None:
        """Launch the gather over the replicas if the parts have changed, or if ``is_anew``."""
        params = (param.sharded for param in self.params)
        version = sum(map(_version, (*params, *self._sources))) + self._group.num_optimizer_steps
        if version != self.gathered_version or is_anew:
            self._drop()
            self._stream = launching_stream(self.mesh.device)
            _run(self._over.launch)
            self.gathered_version, self._is_in_flight = version, True

    def _gather_parts(self) -> None:
        tree = self._group.tree
        self.launch(is_anew=not (tree.is_computing or tree.is_accumulating))
        self.wait()

    def wait(self) -> None:
        """Wait for the gather over the replicas, if one is in flight, and fill the shards."""
        if self._is_in_flight:
            version, self.gathered_version = self.gathered_version, None  # in case the wait fails
            with on_side_stream(self._stream):
                _run(self._over.wait)
            self.gathered_version, self._is_in_flight = version, False

    def _drop(self) -> None:
        """Abandon the gather over the replicas, if one is in flight."""
        if self._is_in_flight:
            _run(self._over.drop)
        self.gathered_version, self._is_in_flight = None, False


def _run(ops: Iterable[Op]) -> None:
    for op in ops:
        op()


def part_buckets(group: ParamGroup) -> list[PartBucket]:
    """Return the buckets of a group that are a `PartBucket`."""
    return [bucket for bucket in group.buckets if isinstance(bucket, PartBucket)]


class _GatherParts(Feature):
    """Gathers all parts when a forward begins, so that the gathers overlap with its compute."""

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return the operation that begins a forward."""
        return (partial(_begin_forward, group.tree),) if phase == "pre_forward" else ()

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Wait for gathers that the forward has not used, before an optimizer writes the parts.

        After an evaluation, the next use gathers again: until then, writes that bump no version
        counter may replace the values.
        """
        for group in tree.groups:
            group.run([bucket.wait for bucket in part_buckets(group)], "gathering")
            for bucket in part_buckets(group) if not torch.is_grad_enabled() else ():
                bucket.gathered_version = None


GATHER_PARTS = _GatherParts()


def _begin_forward(tree: Any) -> None:
    """Launch the gathers of all parts, in the outermost call of a forward.

    Parts without a detected change are gathered, too, except between the microbatches of a training
    step: a write through ``.data`` or by a foreach function bumps no version counter.

    Collective: for each bucket, an all-gather over the replicas.
    """
    if len(tree.call_stack) > 1:
        return
    is_between = tree.is_accumulating and torch.is_grad_enabled()
    with _torch.outside_transforms():
        for group in tree.groups:
            if part_buckets(group) and (group.is_unsharded_registered or group.refresh()):
                is_anew = group.state is State.SHARDED and not is_between
                launch = partial(PartBucket.launch, is_anew=is_anew)
                group.run([partial(launch, each) for each in part_buckets(group)], "gathering")


# Reductions ---------------------------------------------------------------------------------------


class PartReduction(Reduction):
    """A reduce-scatter over the shards, and then another one over the replicas.

    If the loss has a penalty on the parts, the result is written after autograd has written the
    gradient of the penalty: autograd cannot add the gradient of a part to that of a shard.
    """

    def __init__(
        self, buckets: Sequence[Any], params: Sequence[ShardedParam], dtype: torch.dtype, group: Any
    ) -> None:
        super().__init__(buckets, params, dtype, group)
        self._may_lack_rows = True
        self.over_replicas = self._over = OverReplicas(*parts_of(buckets, params), dtype, group)

    def launch(self) -> None:
        """Launch the reduce-scatter over the shards, unless earlier backwards have run it."""
        if not self._group.skips_shards:
            super().launch()
            return
        assert not any(map(torch.is_tensor, self._grads)), "gradients without a backward"
        del self._grads
        self.reduced = self._all_flags.new_zeros(self._numel, dtype=self.dtype)
        self._all_have_grads, self._pending = False, [Pending([])]

    def skip_replicas(self) -> None:
        """Skip the reduction over the replicas; a later backward or an optimizer step runs it.

        Raises:
            ShardError: On all ranks, if a gradient hook of the user would get a gradient that is
                not reduced over the replicas.
        """
        hooked = next((p for p in self.params if _torch.has_grad_hooks(p.sharded)), None)
        if hooked is not None:
            raise ShardError(
                f"Expected no hook on the gradient of '{hooked.name}' of {self._group.label}, "
                "which is not reduced over the replicas in this backward, got one; call "
                "set_requires_all_reduce(True) before the last backward of a step"
            )
        self._specs = self._specs_of("reduced_over_shards")
        for param in self.params:
            self._record_unsynced(param, redistributed_grad(param))

    def launch_over_replicas(self) -> None:
        """Launch the reduce-scatter of the shards, including those of earlier backwards."""
        is_whole = len(self._add_earlier_shards()) == self.num_flags or self._all_have_grads
        shards = map(self.reduced.as_strided, *self._view_args)
        flags = self.reduced[-self.num_flags :]
        self._over.launch_shards(dict(zip(self.params, shards, strict=True)), flags, is_whole)
        del self.reduced

    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet, after a failed backward."""
        super().discard()
        self._over.discard()

    def _results(self) -> Iterable[tuple[int, torch.Tensor, _torch.DTensorSpec]]:
        # Only a gradient of a shard can be added to the new one, which is a gradient of a shard.
        for param in self.params:
            grad: Any = redistributed_grad(param)
            if stage_of(param, grad) == "sharded":
                param.sharded.grad = None
                param.sharded.grad = self._over.shard_with(param, grad)
        return super()._results()

    def _unreduced_form(self, param: ShardedParam, grad: Any) -> torch.Tensor:
        if stage_of(param, grad) == "sharded":
            grad = self._over.shard_with(param, grad)
        return super()._unreduced_form(param, grad)


class OverReplicas(Reduction):
    """The reduction over the replicas: it averages shards of gradients and scatters the parts."""

    def __init__(
        self, buckets: Sequence[Bucket], views: Sequence[_View], dtype: torch.dtype, group: Any
    ) -> None:
        settings = replace(group.settings, divisor=None)  # always a mean
        group = SimpleNamespace(channels=group.channels, settings=settings)
        super().__init__(buckets, views, dtype, group)
        self._may_lack_rows, self._uncast_dtype = True, dtype
        self._views = {view.param: view for view in views}
        # The program calls no `average` after this reduction, so all division comes before it.
        self.division = replace(
            self.division, before=self.division.before * self.division.after, after=1.0
        )
        places = [views.index(cast(_View, view)) for view in self.params]
        self._places = torch.tensor(places, device=self._mesh.device)

    def launch_shards(
        self, shards: Mapping[ShardedParam, torch.Tensor], flags: torch.Tensor, is_whole: bool
    ) -> None:
        """Launch the reduce-scatter of this rank's shards of gradients.

        Args:
            shards: The shard of each gradient, by parameter, in the order of ``flags``.
            flags: For each shard, zero if no rank of the shard group has a gradient, else not zero.
            is_whole: Whether every parameter is known to have a gradient.
        """
        self._grads = [shards[cast(_View, view).param] for view in self.params]
        self._all_flags = flags[self._places].expand(self._mesh.num_shards, -1)
        self.launch()
        self._all_have_grads = is_whole

    def shard_with(self, param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient over the shards such that ``grad`` is its mean over the replicas."""
        shard = self._unreduced_form(self._views[param], grad)
        return _torch.from_local(shard, param.spec("reduced_over_shards", shard.dtype))


def parts_of(
    buckets: Sequence[Any], params: Iterable[ShardedParam]
) -> tuple[list[FlatBucket], list[_View]]:
    """Return the buckets of the parts, and the `_View` of each parameter."""
    views = {view.param: view for bucket in buckets for view in bucket.views}
    return [bucket.parts for bucket in buckets], [views[param] for param in params]
