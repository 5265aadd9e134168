"""The reduction of a group's gradients: from what autograd leaves to what the optimizer sees.

Reduction has up to two stages: a reduce-scatter over the ranks that share the parameters, then an
all-reduce over those that hold the same shards.

A group's parameters may be sharded over several meshes; each has its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from composable_shard import _torch
from composable_shard.core.gradient import (
    ReductionSettings,
    UnreducedGradients,
    deliver,
    deliver_all,
    has_hooks,
    hold_for_replicas,
    is_partial,
    narrowed,
    set_unreplicated,
    take_all_unsharded,
    to_reduce,
    to_reduce_and_held,
    unreplicated,
)
from composable_shard.core.gradient_bucket import GradTransfer
from composable_shard.core.gradient_extension import EncodedBucket, GradRecipes
from composable_shard.core.param import ShardedParam
from composable_shard.core.reduction_plan import (
    ReductionScale,
    Route,
    RoutePlan,
    plan_scale,
    promoted,
)
from composable_shard.core.transport import host
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.failures import announce
from composable_shard.core.transport.host import copies_beside_compute
from composable_shard.core.transport.pending import Pending, on_stream
from composable_shard.core.transport.process_groups import gather_objects

# The gradients of a group's parameters that are sharded over one mesh, on their way ---------------

_Result = TypeVar("_Result")


@dataclass
class _Reduction:
    """A launched reduction: whose gradients it carries, its buffers, what is left to divide by."""

    route: Route
    transfer: GradTransfer
    divide_after: float


def _tells_failures(
    stage: Callable[[MeshGradients], _Result],
) -> Callable[[MeshGradients], _Result]:
    """Let the other ranks know if a stage fails on this one, as in a hook of the user's."""

    @functools.wraps(stage)
    def told(self: MeshGradients) -> _Result:
        try:
            return stage(self)
        except Exception as error:
            announce(self._channel.process_groups, self._channel.reducing, error)
            raise

    return told


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
        settings: ReductionSettings,
    ) -> None:
        self.pending: Pending | None = None
        self.unreduced = UnreducedGradients(params, channel.mesh, settings)
        self._params = list(params)
        self._channel = channel
        self._mesh = channel.mesh
        self._settings = settings
        self._reductions: list[_Reduction] = []
        self._holds = False  # the running reduction leaves gradients to be averaged over replicas
        self._all_reduces = False  # the running reduction has a second stage to come
        self._scales: dict[Any, ReductionScale] = {}
        self._recipes = GradRecipes(channel.mesh)
        self._plan = RoutePlan(channel.mesh, self._recipes)
        self._returning: list[Callable[[], None]] = []  # deliver what is on its way to the host

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

    @_tells_failures
    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced.

        Collective: one reduce-scatter launch for each reduction dtype; all ranks must call it,
        with or without gradients of their own.
        """
        has_replicas = self._mesh.num_replicas > 1
        self._holds = has_replicas and not self._settings.all_reduces
        self._all_reduces = has_replicas and self._settings.all_reduces
        if self._holds:
            for param in to_reduce(self._params):
                hold_for_replicas(param)
        params, held = to_reduce_and_held(self._params)
        for param in params:
            param.is_unsynced = self._holds
        grads = take_all_unsharded(params)
        for index, dtype in enumerate(held):
            if dtype is not None:
                grads[index] = self.unreduced.with_earlier(params[index], grads[index])
        if self._mesh.num_ranks == 1 and self._settings.hook is None:
            self._deliver_alone(params, grads)
            return
        self._recipes.agree(params, grads)
        if loose := self._plan.take_any(params):
            self._agree_on_dtypes(loose, grads, held)
        for index in self._plan.narrows(params):
            grad = grads[index]
            grads[index] = None if grad is None else narrowed(params[index], grad)
        launch, routes = self._channel.reduce_scatter, self._plan.routes_of(params, held)
        kind = {"widens": launch.widens, "reads_padding": launch.reads_padding}
        # before any launch, so that where all ranks fail alike nothing is under way
        transfers = [r.bucket.start_reduce(r.enter(grads), **kind) for r in routes]
        works, owned = [], []
        for route, transfer in zip(routes, transfers, strict=True):
            reduction = _Reduction(route, transfer, 1.0)
            works += self._scatter(reduction)
            owned += [*transfer.inputs, *transfer.outputs, transfer.result]
            self._reductions.append(reduction)
        self.pending = Pending(works, owned, self._channel.reducing)

    @_tells_failures
    def start_all_reduce(self) -> bool:
        """Wait for the shards and launch the reduction over the replicas, if there is to be one.

        Collective: one all-reduce of this rank's shards for each reduction dtype, or none.
        """
        if self.pending is None or not self._all_reduces:
            return False
        self.pending.wait()
        self._all_reduces = False
        average = self._channel.can_average_replicas() and not self._settings.sums_only
        for reduction in self._reductions:
            self._settle(reduction)
            self._add_held(reduction)
            self._release_inputs(reduction)
        works, results = [], [reduction.transfer.result for reduction in self._reductions]
        for reduction, result in zip(self._reductions, results, strict=True):
            dtype, num_replicas = reduction.route.bucket.dtype, self._mesh.num_replicas
            divides = self._channel.divides_over_replicas(dtype)
            scale = plan_scale(num_replicas, dtype, can_average=average, can_divide=divides)
            if scale.before != 1:
                result.div_(scale.before)
            works += self._channel.all_reduce(result, average=scale.averages)
            reduction.divide_after = scale.after
        self.pending = Pending(works, results, self._channel.reducing)
        return True

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        self.start_return()
        self.end_return()

    @_tells_failures
    def start_return(self) -> None:
        """Wait for the launched reduction and send its results to the sharded parameters.

        Those on their way to the host are not there before :meth:`end_return`.
        """
        if self.pending is None:
            return
        self.start_all_reduce()
        self.pending.wait()
        self.pending = None
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            self._settle(reduction)
            self._release_inputs(reduction)
            self._call_hook(reduction)
            self._hand_out(reduction)

    @_tells_failures
    def end_return(self) -> None:
        """Put on the sharded parameters what was on its way to the host."""
        if self._returning:
            host.settle()
            while self._returning:
                self._returning.pop(0)()

    def release(self) -> None:
        """Free what other ranks were reading when reductions were finished, and have read now."""
        self._plan.release()

    def discard(self) -> None:
        """Let the launched reduction end and drop it, and all unsharded gradients."""
        if self.pending is not None:
            self.pending.drop()
            self.pending = None
        for reduction in self._reductions:
            self._release_inputs(reduction)
        self._reductions.clear()
        self._returning.clear()
        take_all_unsharded(self._params)

    def _agree_on_dtypes(
        self,
        loose: Sequence[int],
        grads: Sequence[torch.Tensor | None],
        held: list[torch.dtype | None],
    ) -> None:
        """Note in ``held`` the widest dtype that any rank's gradient of some parameters has.

        Collective: an all-gather of a small object over the shards, and over the replicas.
        """
        said = [None if (grad := grads[index]) is None else grad.dtype for index in loose]
        for group in (self._mesh.shard_group, self._mesh.replica_group):
            if group is not None and group.size() > 1:
                heard = gather_objects(said, group, "agreeing on the dtypes of gradients")
                said = [promoted(dtypes) for dtypes in zip(*heard, strict=True)]
        for index, dtype in zip(loose, said, strict=True):
            held[index] = dtype

    # What goes in ---------------------------------------------------------------------------

    def next_routes(self) -> list[Route]:
        """Return the ways that gradients go in the next reduction. Collective: none."""
        params, held = to_reduce_and_held(self._params)
        return self._plan.routes_of(params, held)

    def _scale(self, dtype: torch.dtype) -> ReductionScale:
        divisor, sums_only = self._settings.divisor, self._settings.sums_only
        key = (dtype, divisor, sums_only, self._channel.reduce_scatter)
        scale = self._scales.get(key)
        if scale is None:
            scale = self._scales[key] = plan_scale(
                self._mesh.num_shards,
                dtype,
                divisor=None if divisor is None else divisor / self._mesh.num_replicas,
                can_average=self._channel.can_average() and not sums_only,
                can_divide=self._channel.reduce_scatter.divides,
            )
        return scale

    def _scatter(self, reduction: _Reduction) -> list[Any]:
        scale, transfer = self._scale(reduction.route.bucket.dtype), reduction.transfer
        if self._mesh.num_shards == 1:
            transfer.stay()
            reduction.divide_after = scale.total
            return []
        if isinstance(reduction.route.bucket, EncodedBucket):
            reduction.divide_after = scale.total
            return self._channel.exchange(transfer.outputs[0], transfer.inputs[0])
        if scale.before != 1:
            assert reduction.route.bucket.dtype == torch.float16  # others keep flags as they are
            _torch.divide_all_(transfer.inputs, scale.before)
        reduction.divide_after = scale.after
        divisor = scale.total if scale.averages else None
        return self._channel.reduce(transfer.outputs, transfer.inputs, divisor)

    # What comes out -------------------------------------------------------------------------

    def _settle(self, reduction: _Reduction) -> None:
        """Divide what a collective has summed."""
        reduction.route.bucket.settle(reduction.transfer, reduction.divide_after)
        reduction.divide_after = 1.0

    def _release_inputs(self, reduction: _Reduction) -> None:
        reduction.transfer.inputs.clear()
        reduction.route.bucket.release()

    def _call_hook(self, reduction: _Reduction) -> None:
        hook, stream = self._settings.hook, self._settings.hook_stream
        if hook is None:
            return
        result = reduction.transfer.result[: reduction.route.bucket.numel]
        with torch.no_grad(), on_stream(stream):
            reduction.route.clear_gaps(result)
            hook(result)

    def _add_held(self, reduction: _Reduction) -> None:
        """Add the gradients that earlier reductions left to be averaged over the replicas."""
        route = reduction.route
        shards = route.shards(reduction.transfer.result)
        for index, ((param, _), shard) in enumerate(zip(route.members, shards, strict=True)):
            held = unreplicated(param)
            if held is None:
                continue
            param.sharded.grad = None
            shard.add_(held.to(shard.device))
            route.bucket.flag(reduction.transfer, index)

    def _hand_out(self, reduction: _Reduction) -> None:
        route, transfer = reduction.route, reduction.transfer
        wanted = route.bucket.anybody_has(transfer)
        count = len(route.members)
        dtypes = [route.bucket.dtype] * count if self._holds else route.grad_dtypes()
        shards = route.converted_shards(transfer.result, dtypes)
        if route.params is not None and not self._holds and all(wanted):
            give = partial(deliver_all, route.params, shards, route.specs(dtypes))
            if route.is_carried and not any(map(has_hooks, route.params)):
                self._returning.append(give)
                return
            if route.is_carried:
                host.settle()
            give()
            return
        host.settle()
        inner: dict[ShardedParam, dict[str, torch.Tensor]] = {}
        for place, ((param, name), shard) in enumerate(zip(route.members, shards, strict=True)):
            if not wanted[place] and not (self._settings.hook is not None and shard.any()):
                continue
            if name is None:
                self._put(param, shard)
                continue
            recipe, parts = self._recipes.of(param), inner.setdefault(param, {})
            assert recipe is not None
            parts[name] = shard.clone()  # subclasses may demand equal storage offsets
            if len(parts) == len(recipe.names):
                self._put(param, recipe.rebuild(parts).to(dtypes[place]))

    def _put(self, param: ShardedParam, shard: torch.Tensor) -> None:
        if not self._holds:
            deliver(param, shard)
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
            grad = grad.to(param.final_grad_dtype(grad.dtype))
            if scale is not None:
                grad = grad / scale
            is_carried = copies_beside_compute(param.offload, self._mesh.device)
            if is_carried and type(grad) is torch.Tensor and not has_hooks(param):
                self._returning.append(partial(deliver, param, host.download(grad)))
            else:
                deliver(param, grad.to(param.device))


# From the gradients that autograd leaves on unsharded parameters to those the optimizer sees ------


class GroupGradients:
    """Accumulates, reduces and hands out the gradients of one group."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        channels: Sequence[Channel],
        settings: ReductionSettings,
    ) -> None:
        self._params = list(params)
        self._meshes = [
            MeshGradients([p for p in params if p.mesh == channel.mesh], channel, settings)
            for channel in channels
        ]

    @property
    def is_pending(self) -> bool:
        """Whether a reduction was launched and is not finished."""
        return any(one.pending is not None for one in self._meshes)

    @property
    def are_to_reduce(self) -> bool:
        """Whether a reduction takes in any of them, which all ranks tell alike."""
        return bool(to_reduce(self._params))

    def next_routes(self) -> list[list[Route]]:
        """Return for each channel the ways of the next reduction. Collective: none."""
        return [one.next_routes() for one in self._meshes]

    def accumulate(self) -> None:
        """Add the unsharded gradients to what is not yet reduced. Collective: none."""
        self.finish()
        for one in self._meshes:
            one.accumulate()

    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced; see MeshGradients."""
        self.finish()
        for one in self._meshes:
            one.reduce()

    def wait(self) -> None:
        """Wait for what was launched last; what comes of it is left to the methods below."""
        for one in self._meshes:
            if one.pending is not None:
                one.pending.wait()

    def start_all_reduce(self) -> bool:
        """Go on to the reduction over the replicas; return whether there is one."""
        return any([one.start_all_reduce() for one in self._meshes])

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        for one in self._meshes:
            one.finish()

    def start_return(self) -> None:
        """Wait for the launched reduction; its results may be on their way to the host then."""
        for one in self._meshes:
            one.start_return()

    def end_return(self) -> None:
        """Put on the sharded parameters what was on its way to the host."""
        for one in self._meshes:
            one.end_return()

    def release(self) -> None:
        """Free what other ranks were reading when reductions were finished, and have read now."""
        for one in self._meshes:
            one.release()

    def discard(self) -> None:
        """Let the launched reduction end and drop it, and all unsharded gradients."""
        for one in self._meshes:
            one.discard()

    def has_partial(self) -> bool:
        """Tell whether any parameter has a gradient that is not reduced over all ranks."""
        return any(is_partial(param.sharded.grad) for param in self._params)

    def discard_partial(self) -> None:
        """Drop the gradients that are accumulated but not reduced."""
        for param in self._params:
            if is_partial(param.sharded.grad):
                param.sharded.grad = None
