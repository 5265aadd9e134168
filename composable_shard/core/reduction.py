"""The reduction of a group's gradients: from what autograd leaves to what the optimizer sees.

Reduction has up to two stages: a reduce-scatter over the ranks that share the parameters, then an
all-reduce over those that hold the same shards.

A group's parameters may be sharded over several meshes; each has its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

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
    refuse_sparse,
    set_unreplicated,
    take_all_unsharded,
    to_reduce,
    to_reduce_and_held,
    unreplicated,
)
from composable_shard.core.gradient_bucket import GradTransfer
from composable_shard.core.gradient_extension import EncodedBucket, GradientCodecs
from composable_shard.core.param import ShardedParam
from composable_shard.core.reduction_plan import (
    ReductionPlan,
    ReductionPlanner,
    ReductionScale,
    plan_scale,
    promoted,
)
from composable_shard.core.transport import host
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.failures import announce
from composable_shard.core.transport.host import copies_beside_compute
from composable_shard.core.transport.pending import Pending, beside
from composable_shard.core.transport.process_groups import agree

# The gradients of a group's parameters that are sharded over one mesh, on their way ---------------

_Result = TypeVar("_Result")


@dataclass
class _Part:
    """What one buffer carries: whose gradients, its memory, what is left to divide by."""

    plan: ReductionPlan
    transfer: GradTransfer
    divide_after: float


class Idle(NamedTuple):
    """Nothing is on its way."""


class Scattering(NamedTuple):
    """The reduce-scatter has been launched.

    Attributes:
        over_replicas: What becomes of the result where shards have replicas: it is all-reduced
            next, or held until a later reduction does that; ``None`` without replicas.
    """

    pending: Pending
    parts: list[_Part]
    over_replicas: Literal["all-reduce", "hold"] | None


class AllReducing(NamedTuple):
    """The all-reduce over the replicas has been launched."""

    pending: Pending
    parts: list[_Part]


class Returning(NamedTuple):
    """The results are delivered, but those that are on their way to the host."""

    deliveries: list[Callable[[], None]]


State = Idle | Scattering | AllReducing | Returning

_LEGAL: dict[type, tuple[type, ...]] = {
    Idle: (Scattering, Returning),
    Scattering: (AllReducing, Returning, Idle),
    AllReducing: (Returning, Idle),
    Returning: (Idle,),
}


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
        state: How far the reduction has come.
        unreduced: The gradients that are not reduced.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        channel: Channel,
        settings: ReductionSettings,
    ) -> None:
        self.state: State = Idle()
        self.unreduced = UnreducedGradients(params, channel.mesh, settings)
        self._params = list(params)
        self._channel = channel
        self._mesh = channel.mesh
        self._settings = settings
        self._scales: dict[Any, ReductionScale] = {}
        self._codecs = GradientCodecs(channel.mesh)
        self._planner = ReductionPlanner(channel.mesh, self._codecs)

    @property
    def pending(self) -> Pending | None:
        """What was launched last, until its results are delivered."""
        state = self.state
        return state.pending if isinstance(state, (Scattering, AllReducing)) else None

    def _move_to(self, state: State) -> None:
        assert type(state) in _LEGAL[type(self.state)], f"{self.state} -> {state}"
        self.state = state

    @_tells_failures
    def accumulate(self) -> None:
        """Add the unsharded gradients to what is not yet reduced; alone, they are the sum.

        Hooks of the user's wait for the reduction, and so does rounding to what users get.
        """
        if self._mesh.num_ranks == 1 and self._settings.hook is None and self._is_summed_at_once:
            self.reduce()
            self.finish()
        else:
            self.unreduced.accumulate()

    @property
    def _is_summed_at_once(self) -> bool:
        """Whether a gradient of this rank alone may be added to what users see, as precisely."""
        for param in self._params:
            dtype = param.reduction_dtype()
            final = param.final_grad_dtype(dtype)
            if has_hooks(param) or torch.promote_types(dtype, final) != final:
                return False
        return True

    # The stages -----------------------------------------------------------------------------

    @_tells_failures
    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced.

        Collective: one reduce-scatter launch for each reduction dtype; all ranks must call it,
        with or without gradients of their own.
        """
        over_replicas: Literal["all-reduce", "hold"] | None = None
        if self._mesh.num_replicas > 1:
            over_replicas = "all-reduce" if self._settings.all_reduces else "hold"
        if over_replicas == "hold":
            for param in to_reduce(self._params):
                hold_for_replicas(param)
        params, held = to_reduce_and_held(self._params)
        for param in params:
            param.is_unsynced = over_replicas == "hold"
        grads = take_all_unsharded(params)
        for index, dtype in enumerate(held):
            if dtype is not None:
                grads[index] = self.unreduced.with_earlier(params[index], grads[index])
        if self._mesh.num_ranks == 1 and self._settings.hook is None:
            self._move_to(Returning(self._deliver_alone(params, grads)))
            return
        refuse_sparse(params, grads)
        self._codecs.agree(params, grads)
        self._planner.look_at(params)
        if self._planner.take_any:
            self._agree_on_dtypes(self._planner.take_any, grads, held)
        for index in self._planner.rounded_first:
            grad = grads[index]
            grads[index] = None if grad is None else narrowed(params[index], grad)
        launch, plans = self._channel.reduce_scatter, self._planner.plans_of(params, held)
        kind = {"widens": launch.widens, "reads_padding": launch.reads_padding}
        # before any launch, so that where all ranks fail alike nothing is under way
        parts = [
            _Part(plan, plan.bucket.start_reduce(plan.enter(grads), **kind), 1.0) for plan in plans
        ]
        works, owned = [], []
        for part in parts:
            works += self._scatter(part)
            transfer = part.transfer
            owned += [*transfer.outputs, transfer.result]
            if launch.keeps_inputs and not isinstance(part.plan.bucket, EncodedBucket):
                self._release_inputs(part)
            owned += transfer.inputs
        pending = Pending(works, owned, self._channel.reducing)
        self._move_to(Scattering(pending, parts, over_replicas))

    @_tells_failures
    def start_all_reduce(self) -> bool:
        """Wait for the shards and launch the reduction over the replicas, if there is to be one.

        Collective: one all-reduce of this rank's shards for each reduction dtype, or none.
        """
        state = self.state
        if not isinstance(state, Scattering) or state.over_replicas != "all-reduce":
            return False
        state.pending.wait()
        average = self._channel.can_average_replicas() and not self._settings.sums_only
        for part in state.parts:
            self._divide(part)
            self._add_held(part)
            self._release_inputs(part)
        works, results = [], [part.transfer.result for part in state.parts]
        for part, result in zip(state.parts, results, strict=True):
            dtype, num_replicas = part.plan.bucket.dtype, self._mesh.num_replicas
            divides = self._channel.divides_over_replicas(dtype)
            scale = plan_scale(num_replicas, dtype, can_average=average, can_divide=divides)
            if scale.before != 1:
                result.div_(scale.before)
            works += self._channel.all_reduce(result, average=scale.averages)
            part.divide_after = scale.after
        self._move_to(AllReducing(Pending(works, results, self._channel.reducing), state.parts))
        return True

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        if not isinstance(self.state, Idle):
            self.start_return()
            self.end_return()

    @_tells_failures
    def start_return(self) -> None:
        """Wait for the launched reduction and send its results to the sharded parameters.

        Those on their way to the host are not there before :meth:`end_return`.
        """
        if isinstance(self.state, Scattering) and self.state.over_replicas == "all-reduce":
            self.start_all_reduce()
        state = self.state
        if not isinstance(state, (Scattering, AllReducing)):
            return
        state.pending.wait()
        is_held = isinstance(state, Scattering) and state.over_replicas == "hold"
        deliveries: list[Callable[[], None]] = []
        self._move_to(Returning(deliveries))
        for part in state.parts:
            self._divide(part)
            self._release_inputs(part)
            if is_held:  # the hook waits for what is averaged over the replicas, too
                self._hold(part)
            else:
                self._call_hook(part)
                deliveries += self._hand_out(part)

    @_tells_failures
    def end_return(self) -> None:
        """Put on the sharded parameters what was on its way to the host."""
        state = self.state
        if not isinstance(state, Returning):
            return
        if state.deliveries:
            host.settle()
            while state.deliveries:
                state.deliveries.pop(0)()
        self._move_to(Idle())

    def discard(self) -> None:
        """Let the launched reduction end and drop it, and all unsharded gradients."""
        state = self.state
        if isinstance(state, (Scattering, AllReducing)):
            state.pending.drop()
            for part in state.parts:
                self._release_inputs(part)
        if not isinstance(state, Idle):
            self._move_to(Idle())
        self._planner.release()
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
        said = agree(said, self._mesh, _widest, "agreeing on the dtypes of gradients")
        for index, dtype in zip(loose, said, strict=True):
            held[index] = dtype

    # What goes in ---------------------------------------------------------------------------

    def next_plans(self) -> list[ReductionPlan]:
        """Return the ways that gradients go in the next reduction. Collective: none."""
        params, held = to_reduce_and_held(self._params)
        self._planner.look_at(params)
        return self._planner.plans_of(params, held)

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

    def _scatter(self, part: _Part) -> list[Any]:
        scale, transfer = self._scale(part.plan.bucket.dtype), part.transfer
        if self._mesh.num_shards == 1:
            transfer.stay()
            part.divide_after = scale.total
            return []
        if isinstance(part.plan.bucket, EncodedBucket):
            part.divide_after = scale.total
            return self._channel.exchange(transfer.outputs[0], transfer.inputs[0])
        if scale.before != 1:
            assert part.plan.bucket.dtype == torch.float16  # others keep flags as they are
            _torch.divide_all_(transfer.inputs, scale.before)
        part.divide_after = scale.after
        divisor = scale.total if scale.averages else None
        return self._channel.reduce(transfer.outputs, transfer.inputs, divisor)

    # What comes out -------------------------------------------------------------------------

    def _divide(self, part: _Part) -> None:
        """Divide what a collective has summed."""
        part.plan.bucket.divide(part.transfer, part.divide_after)
        part.divide_after = 1.0

    def _release_inputs(self, part: _Part) -> None:
        part.transfer.inputs.clear()
        part.plan.bucket.release()

    def _call_hook(self, part: _Part) -> None:
        hook, stream = self._settings.hook, self._settings.hook_stream
        if hook is None:
            return
        result = part.transfer.result[: part.plan.bucket.numel]
        with torch.no_grad(), beside(stream):
            part.plan.clear_gaps(result)
            hook(result)

    def _add_held(self, part: _Part) -> None:
        """Add the gradients that earlier reductions left to be averaged over the replicas."""
        plan = part.plan
        shards = plan.shards(part.transfer.result)
        for index, ((param, _), shard) in enumerate(zip(plan.members, shards, strict=True)):
            held = unreplicated(param)
            if held is None:
                continue
            param.sharded.grad = None
            shard.add_(held.to(shard.device))
            plan.bucket.flag(part.transfer, index)

    def _hand_out(self, part: _Part) -> list[Callable[[], None]]:
        """Put the results on the sharded parameters.

        Returns:
            What does so for those that are on their way to the host, when they are there.
        """
        plan = part.plan
        wanted, dtypes = plan.bucket.anybody_has(part.transfer), plan.grad_dtypes()
        shards = plan.converted_shards(part.transfer.result, dtypes)
        if plan.params is not None and all(wanted):
            give = partial(deliver_all, plan.params, shards, plan.specs(dtypes))
            if plan.is_on_host and not any(map(has_hooks, plan.params)):
                return [give]
            if plan.is_on_host:
                host.settle()
            give()
        else:
            host.settle()
            for param, shard in self._rebuilt(part, wanted, shards, dtypes):
                deliver(param, shard)
        return []

    def _hold(self, part: _Part) -> None:
        """Leave the results, averaged over the shards, for a later all-reduce."""
        plan = part.plan
        dtypes = [plan.bucket.dtype] * len(plan.members)
        wanted = plan.bucket.anybody_has(part.transfer)
        shards = plan.converted_shards(part.transfer.result, dtypes)
        host.settle()
        for param, shard in self._rebuilt(part, wanted, shards, dtypes):
            present = unreplicated(param)
            if present is None:
                set_unreplicated(param, shard)
            else:
                present.add_(shard.to(present.device))

    def _rebuilt(
        self,
        part: _Part,
        wanted: Sequence[bool],
        shards: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
        """Yield each parameter that gets a gradient with it; subclasses of their inner tensors."""
        members = part.plan.members
        inner: dict[ShardedParam, dict[str, torch.Tensor]] = {}
        for place, ((param, name), shard) in enumerate(zip(members, shards, strict=True)):
            if not wanted[place] and not (self._settings.hook is not None and shard.any()):
                continue
            if name is None:
                yield param, shard
                continue
            codec, parts = self._codecs.of(param), inner.setdefault(param, {})
            assert codec is not None
            parts[name] = shard.clone()  # subclasses may demand equal storage offsets
            if len(parts) == len(codec.names):
                yield param, codec.rebuild(parts).to(dtypes[place])

    def _deliver_alone(
        self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]
    ) -> list[Callable[[], None]]:
        """Hand out gradients that no other rank has a part in, as :meth:`_hand_out` does."""
        deliveries: list[Callable[[], None]] = []
        scale = self._settings.divisor
        for param, grad in zip(params, grads, strict=True):
            if grad is None:
                continue
            grad = grad.to(param.final_grad_dtype(grad.dtype))
            if scale is not None:
                grad = grad / scale
            is_on_host = copies_beside_compute(param.offload, self._mesh.device)
            if is_on_host and type(grad) is torch.Tensor and not has_hooks(param):
                deliveries.append(partial(deliver, param, host.download(grad)))
            else:
                deliver(param, grad.to(param.device))
        return deliveries


def _widest(heard: dict[int, list[torch.dtype | None]]) -> list[torch.dtype | None]:
    return [promoted(dtypes) for dtypes in zip(*heard.values(), strict=True)]


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
    def are_to_reduce(self) -> bool:
        """Whether a reduction takes in any of them, which all ranks tell alike."""
        return bool(to_reduce(self._params))

    def next_plans(self) -> list[list[ReductionPlan]]:
        """Return for each channel the ways of the next reduction. Collective: none."""
        return [one.next_plans() for one in self._meshes]

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
            if (pending := one.pending) is not None:
                pending.wait()

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

    def discard(self) -> None:
        """Let the launched reduction end and drop it, and all unsharded gradients."""
        for one in self._meshes:
            one.discard()

    def discard_partial(self) -> None:
        """Drop the gradients that are accumulated but not reduced."""
        for param in self._params:
            if is_partial(param.sharded.grad):
                param.sharded.grad = None
