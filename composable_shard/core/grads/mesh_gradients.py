"""The gradients of a group's parameters that are sharded over one mesh, on their way.

Reduction has up to two stages: a reduce-scatter over the ranks that share the parameters, then an
all-reduce over those that hold the same shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from composable_shard import _torch
from composable_shard.core.comms.channel import Channel
from composable_shard.core.comms.streams import Pending, on_stream
from composable_shard.core.grads.grad_bucket import GradBucket, GradTransfer
from composable_shard.core.grads.grad_recipes import GradRecipes
from composable_shard.core.grads.scale import ReductionScale, plan_scale
from composable_shard.core.grads.sharded_grad import (
    deliver,
    has_hooks,
    hold_for_replicas,
    set_unreplicated,
    unreduced,
    unreplicated,
)
from composable_shard.core.grads.unreduced import UnreducedGradients, take_unsharded
from composable_shard.core.params.param import ShardedParam
from composable_shard.core.settings import ReductionSettings
from composable_shard.policy import MixedPrecisionPolicy


class _Member(NamedTuple):
    """One plain tensor to reduce: a gradient, or the inner tensor ``inner`` of one."""

    param: ShardedParam
    inner: str | None
    grad: torch.Tensor | None


@dataclass
class _Reduction:
    """A launched reduction: a bucket, its transfer, whose gradients it carries, what is left."""

    bucket: GradBucket
    transfer: GradTransfer
    members: list[tuple[ShardedParam, str | None]]
    divide_after: float


class MeshGradients:
    """Reduces and hands out the gradients of some parameters, all over one mesh.

    Attributes:
        pending: What was launched last, until it is waited for.
        unreduced: The gradients that are not reduced.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        channel: Channel,
        policy: MixedPrecisionPolicy,
        settings: ReductionSettings,
    ) -> None:
        self.pending: Pending | None = None
        self.unreduced = UnreducedGradients(params, channel.mesh, policy, settings)
        self._params = list(params)
        self._channel = channel
        self._mesh = channel.mesh
        self._policy = policy
        self._settings = settings
        self._reductions: list[_Reduction] = []
        self._holds = False  # the running reduction leaves gradients to be averaged over replicas
        self._all_reduces = False  # the running reduction has a second stage to come
        self._buckets: dict[Any, GradBucket] = {}
        self._recipes = GradRecipes(channel.mesh)

    def accumulate(self) -> None:
        """Add the unsharded gradients to what is not yet reduced; alone, they are the sum.

        Hooks of the user's wait for the reduction.
        """
        if self._mesh.num_ranks == 1 and not any(map(has_hooks, self._params)):
            self.reduce()
            self.finish()
        else:
            self.unreduced.accumulate()

    # The stages -----------------------------------------------------------------------------

    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced.

        Collective: one reduce-scatter launch for each reduction dtype; all ranks must call it,
        with or without gradients of their own.
        """
        trainable = [param for param in self._params if param.sharded.requires_grad]
        has_replicas = self._mesh.num_replicas > 1
        self._holds = has_replicas and not self._settings.all_reduces
        self._all_reduces = has_replicas and self._settings.all_reduces
        if self._holds:
            for param in trainable:
                hold_for_replicas(param)
        dtypes = [self._reduce_dtype(param) for param in trainable]
        grads = [self.unreduced.take(param) for param in trainable]
        if self._mesh.num_ranks == 1 and self._settings.hook is None:
            self._deliver_alone(trainable, grads)
            return
        self._recipes.agree(trainable, grads)
        works, owned = [], []
        for dtype, members in self._members(trainable, grads, dtypes).items():
            reduction = self._start(dtype, members)
            transfer = reduction.transfer
            works += self._scatter(reduction)
            owned += [*transfer.inputs, transfer.result]
            self._reductions.append(reduction)
        self.pending = Pending(works, owned)

    def start_all_reduce(self) -> bool:
        """Wait for the shards and launch the reduction over the replicas, if there is to be one.

        Collective: one all-reduce of this rank's shards for each reduction dtype, or none.
        """
        if self.pending is None or not self._all_reduces:
            return False
        self.pending.wait()
        self._all_reduces = False
        average = self._channel.can_average_replicas() and not self._settings.sums_only
        works = []
        for reduction in self._reductions:
            self._settle(reduction)
            self._add_held(reduction)
            transfer = reduction.transfer
            transfer.inputs.clear()
            scale = plan_scale(self._mesh.num_replicas, reduction.bucket.dtype, can_average=average)
            if scale.before != 1:
                transfer.result.div_(scale.before)
            works += self._channel.all_reduce(transfer.result, average=scale.averages)
            reduction.divide_after = scale.after
        self.pending = Pending(works, [r.transfer.result for r in self._reductions])
        return True

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        if self.pending is None:
            return
        self.start_all_reduce()
        self.pending.wait()
        self.pending = None
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            self._settle(reduction)
            self._call_hook(reduction)
            self._hand_out(reduction)

    def discard(self) -> None:
        """Wait for the launched reduction and drop it, and all unsharded gradients."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        self._reductions.clear()
        for param in self._params:
            take_unsharded(param)

    # What goes in ---------------------------------------------------------------------------

    def _reduce_dtype(self, param: ShardedParam) -> torch.dtype:
        own = self._policy.reduction_dtype(param.local.dtype)
        held = unreduced(param)
        if held is None:
            held = unreplicated(param)
        return own if held is None else torch.promote_types(own, held.dtype)

    def _members(
        self,
        params: Sequence[ShardedParam],
        grads: Sequence[torch.Tensor | None],
        dtypes: Sequence[torch.dtype],
    ) -> dict[torch.dtype, list[_Member]]:
        """Sort plain gradients, and the inner tensors of others, by the dtype of reduction."""
        members: dict[torch.dtype, list[_Member]] = {}
        for param, grad, dtype in zip(params, grads, dtypes, strict=True):
            recipe = self._recipes.of(param)
            names: tuple[str | None, ...] = recipe.names if recipe else (None,)
            for name in names:
                inner = grad if grad is None or name is None else getattr(grad, name)
                rows = None if inner is None else param.form.rows(inner)
                members.setdefault(dtype, []).append(_Member(param, name, rows))
        return members

    def _start(self, dtype: torch.dtype, members: list[_Member]) -> _Reduction:
        layouts = tuple(member.param.layout for member in members)
        bucket = self._buckets.get((layouts, dtype))
        if bucket is None:
            bucket = GradBucket(layouts, self._mesh.num_shards, dtype, self._mesh.device)
            self._buckets[layouts, dtype] = bucket
        grads = [member.grad for member in members]
        transfer = bucket.start_reduce(grads, widens=self._channel.reduce_scatter.widens)
        places = [(member.param, member.inner) for member in members]
        return _Reduction(bucket, transfer, places, 1.0)

    def _scale(self, dtype: torch.dtype) -> ReductionScale:
        divisor, averages = self._settings.divisor, self._channel.can_average()
        return plan_scale(
            self._mesh.num_shards,
            dtype,
            divisor=None if divisor is None else divisor / self._mesh.num_replicas,
            can_average=averages and not self._settings.sums_only,
        )

    def _scatter(self, reduction: _Reduction) -> list[Any]:
        scale, transfer = self._scale(reduction.bucket.dtype), reduction.transfer
        if self._mesh.num_shards == 1:
            transfer.stay()
            reduction.divide_after = scale.before * scale.after
            return []
        if scale.before != 1:
            _torch.divide_all_(transfer.inputs, scale.before)
        reduction.divide_after = scale.after
        return self._channel.reduce(transfer.outputs, transfer.inputs, average=scale.averages)

    # What comes out -------------------------------------------------------------------------

    def _settle(self, reduction: _Reduction) -> None:
        """Divide what a collective has summed."""
        if reduction.divide_after != 1:
            reduction.transfer.result.div_(reduction.divide_after)
            reduction.divide_after = 1.0

    def _call_hook(self, reduction: _Reduction) -> None:
        hook, stream = self._settings.hook, self._settings.hook_stream
        if hook is None:
            return
        with torch.no_grad(), on_stream(stream):
            hook(reduction.transfer.result[: reduction.bucket.numel])

    def _add_held(self, reduction: _Reduction) -> None:
        """Add the gradients that earlier reductions left to be averaged over the replicas."""
        shards = self._shards(reduction, reduction.transfer.result)
        for index, ((param, _), shard) in enumerate(zip(reduction.members, shards, strict=True)):
            held = unreplicated(param)
            if held is None:
                continue
            param.sharded.grad = None
            shard.add_(held.to(shard.device))
            reduction.bucket.flag(reduction.transfer, index)

    def _shards(self, reduction: _Reduction, flat: torch.Tensor) -> list[torch.Tensor]:
        rank = self._mesh.shard_rank
        offsets = reduction.bucket.layout.shard_offsets
        return [
            param.form.local(flat[start:], rank)
            for (param, _), start in zip(reduction.members, offsets, strict=True)
        ]

    def _hand_out(self, reduction: _Reduction) -> None:
        bucket, transfer, flat = reduction.bucket, reduction.transfer, reduction.transfer.result
        wanted = bucket.anybody_has(transfer)
        if not self._holds:
            dtypes = {self._grad_dtype(param) for param, _ in reduction.members}
            if len(dtypes) == 1:
                flat = flat.to(dtypes.pop())
        devices = {param.device for param, _ in reduction.members}
        if len(devices) == 1:
            flat = flat.to(devices.pop())
        inner: dict[ShardedParam, dict[str, torch.Tensor]] = {}
        shards = self._shards(reduction, flat)
        for (param, name), shard, is_wanted in zip(reduction.members, shards, wanted, strict=True):
            if not is_wanted and not (self._settings.hook is not None and shard.any()):
                continue
            if name is None:
                self._put(param, shard)
                continue
            recipe, parts = self._recipes.of(param), inner.setdefault(param, {})
            assert recipe is not None
            parts[name] = shard.clone()  # subclasses may demand equal storage offsets
            if len(parts) == len(recipe.names):
                self._put(param, recipe.rebuild(parts))

    def _put(self, param: ShardedParam, shard: torch.Tensor) -> None:
        if not self._holds:
            deliver(param, shard.to(self._grad_dtype(param)))
            return
        present = unreplicated(param)
        if present is None:
            set_unreplicated(param, shard)
        else:
            present.add_(shard.to(present.device))

    def _deliver_alone(
        self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Hand out gradients that no other rank has a part in."""
        scale = self._settings.divisor
        for param, grad in zip(params, grads, strict=True):
            if grad is None:
                continue
            grad = grad.to(self._grad_dtype(param))
            deliver(param, grad if scale is None else grad / scale)

    def _grad_dtype(self, param: ShardedParam) -> torch.dtype:
        asked = param.remember_grad_dtype()
        return asked or self._policy.grad_dtype or param.local.dtype
