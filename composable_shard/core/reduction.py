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
    note_unsynced,
    refuse_sparse,
    set_unreplicated,
    settled,
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
    inner_of,
    plan_scale,
    promoted,
)
from composable_shard.core.transport import host
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import may_read_padding
from composable_shard.core.transport.failures import announce
from composable_shard.core.transport.host import copies_beside_compute
from composable_shard.core.transport.pending import (
    Pending,
    launching_stream,
    run_beside,
    stream_beside,
)
from composable_shard.core.transport.process_groups import agree
from composable_shard.errors import ShardError

# The gradients of a group's parameters that are sharded over one mesh, on their way ---------------

_Result = TypeVar("_Result")


@dataclass
class _Part:
    """What one buffer carries: whose gradients, its memory, what is left to divide by."""

    plan: ReductionPlan
    transfer: GradTransfer
    divide_after: float


class _Wanted(NamedTuple):
    """Which members of a plan get a gradient.

    Attributes:
        flags: Says so for each.
        is_on_its_way: Whether they are being copied to the host; see ``host.settle``.
    """

    flags: torch.Tensor
    is_on_its_way: bool


class Idle(NamedTuple):
    """Nothing is on its way."""


class Scattering(NamedTuple):
    """The reduce-scatter has been launched.

    Attributes:
        over_replicas: What becomes of the result where shards have replicas: it is all-reduced
            next, or held until a later reduction does that; ``None`` without replicas.
        all_reduce: That, if it is launched already and begins behind the reduce-scatter.
    """

    pending: Pending
    parts: list[_Part]
    over_replicas: Literal["all-reduce", "hold"] | None
    all_reduce: Pending | None = None


class AllReducing(NamedTuple):
    """The all-reduce over the replicas has been launched."""

    pending: Pending
    parts: list[_Part]


class Returning(NamedTuple):
    """Some results are delivered, and some are on their way to the host."""

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
        self.unreduced = UnreducedGradients(channel.mesh, settings)
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
        waiting = self._params
        if self._is_alone:
            at_once = [param for param in self._params if _is_summed_at_once(param)]
            for param in to_reduce(at_once):
                note_unsynced(param)
            self._deliver_alone(at_once)
            self.finish()
            waiting = [param for param in self._params if not _is_summed_at_once(param)]
        self.unreduced.accumulate(waiting)

    @property
    def _is_alone(self) -> bool:
        """Whether nothing is sent, and nobody looks at what would be."""
        return self._mesh.num_ranks == 1 and self._settings.hook is None

    # The stages -----------------------------------------------------------------------------

    @_tells_failures
    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced.

        Collective: one reduce-scatter launch for each reduction dtype; all ranks must call it,
        with or without gradients of their own.
        """
        if self._is_alone:
            self._deliver_alone(self._params)
            for param in self._params:
                param.is_unsynced = False
            return
        over_replicas: Literal["all-reduce", "hold"] | None = None
        if self._mesh.num_replicas > 1:
            over_replicas = "all-reduce" if self._settings.all_reduces else "hold"
        if over_replicas == "hold":
            for param in to_reduce(self._params):
                note_unsynced(param)
                hold_for_replicas(param)
        params, held = to_reduce_and_held(self._params)
        for param in params:
            param.is_unsynced = over_replicas == "hold"
        grads = self._taken(params, held)
        refuse_sparse(params, grads)
        # before any launch, so that where all ranks fail alike nothing is under way
        parts = self._start_parts(params, held, grads)
        grads.clear()  # of what was copied, only the copy is there while it travels
        launch = self._channel.reduce_scatter
        works = []
        for part in parts:
            works += self._scatter(part)
            if launch.keeps_inputs and not isinstance(part.plan.bucket, EncodedBucket):
                self._release_inputs(part)
        pending = Pending(works, self._channel.reducing, launching_stream(self._mesh.device))
        all_reduce = None
        if over_replicas == "all-reduce" and self._goes_on_by_itself(parts):
            all_reduce = self._all_reduce_behind(pending, parts)
        self._move_to(Scattering(pending, parts, over_replicas, all_reduce))

    def _goes_on_by_itself(self, parts: Sequence[_Part]) -> bool:
        """Whether what comes between two collectives may be done beside compute."""
        is_encoded = any(isinstance(part.plan.bucket, EncodedBucket) for part in parts)
        return not (is_encoded or self._channel.reduce_scatter.copies_out)

    def _all_reduce_behind(self, scattering: Pending, parts: Sequence[_Part]) -> Pending | None:
        """Launch the all-reduce to begin when the reduce-scatter ends; ``None`` on the CPU.

        Hazard: if it fails, nobody keeps the parts, whose memory goes back to compute while the
        reduce-scatter writes it. Guard: compute continues after that. Test:
        ``test_memory_of_a_failed_launch_goes_back_when_nothing_uses_it``.
        """
        compute, beside = launching_stream(self._mesh.device), stream_beside(self._mesh.device)
        if compute is None or beside is None:
            return None
        beside.wait_stream(compute)
        try:
            scattering.pass_through(beside)
            with _torch.on_stream(beside):
                return self._all_reduce(parts, compute)
        except BaseException:
            compute.wait_stream(beside)
            raise

    def _all_reduce(self, parts: Sequence[_Part], stream: torch.Stream | None) -> Pending:
        """Launch the all-reduce of shards that have been waited for.

        Args:
            parts: The shards.
            stream: To which their memory belongs, if there are any.
        """
        average = self._channel.can_average_replicas() and not self._settings.sums_only
        works, owned = [], list[torch.Tensor]()
        for part in parts:
            self._divide(part)
            owned += self._add_held(part)
        for part in parts:
            result, dtype = part.transfer.result, part.plan.bucket.dtype
            divides = self._channel.divides_over_replicas(dtype)
            num_replicas = self._mesh.num_replicas
            scale = plan_scale(num_replicas, dtype, can_average=average, can_divide=divides)
            if may_read_padding(self._mesh.device):
                part.plan.clear_gaps(result)
            if scale.before != 1:
                result.div_(scale.before)
            works += self._channel.all_reduce(result, average=scale.averages)
            part.divide_after = scale.after
        return Pending(works, self._channel.reducing, stream, owned)

    @_tells_failures
    def start_all_reduce(self) -> bool:
        """Wait for the shards; launch the reduction over the replicas, if that is to be done yet.

        Collective: one all-reduce of this rank's shards for each reduction dtype, or none.

        Returns:
            Whether there is one under way.
        """
        state = self.state
        if not isinstance(state, Scattering) or state.over_replicas != "all-reduce":
            return False
        with state.pending.resumed():
            state.pending.wait()
            stream = launching_stream(self._mesh.device)
            pending = state.all_reduce or self._all_reduce(state.parts, stream)
            for part in state.parts:
                self._release_inputs(part)
        self._move_to(AllReducing(pending, state.parts))
        return True

    @property
    def is_all_reducing(self) -> bool:
        """Whether the reduction over the replicas has been launched."""
        state = self.state
        return isinstance(state, AllReducing) or getattr(state, "all_reduce", None) is not None

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        if not isinstance(self.state, Idle) and self.start_return():
            self.end_return()

    @_tells_failures
    def start_return(self) -> bool:
        """Wait for the launched reduction and put its results on the sharded parameters.

        Returns:
            Whether some are on their way to the host, and not there before :meth:`end_return`.
        """
        if isinstance(self.state, Scattering) and self.state.over_replicas == "all-reduce":
            self.start_all_reduce()
        state = self.state
        if not isinstance(state, (Scattering, AllReducing)):
            return isinstance(state, Returning)
        is_held = isinstance(state, Scattering) and state.over_replicas == "hold"
        deliveries: list[Callable[[], None]] = []
        with state.pending.resumed():
            state.pending.wait()
            self._move_to(Returning(deliveries))
            for part in state.parts:
                self._divide(part)
                self._release_inputs(part)
                if not is_held:  # the hook waits for what is averaged over the replicas, too
                    self._call_hook(part)
                deliveries += self._hand_out(part, is_held=is_held)
        if not deliveries:
            self._move_to(Idle())
        return bool(deliveries)

    @_tells_failures
    def end_return(self) -> None:
        """Put on the sharded parameters what was on its way to the host."""
        state = self.state
        if not isinstance(state, Returning):
            return
        host.settle()
        while state.deliveries:
            state.deliveries.pop(0)()
        self._move_to(Idle())

    def discard(self) -> None:
        """Let the launched reduction end and drop it, and all unsharded gradients."""
        state = self.state
        if isinstance(state, (Scattering, AllReducing)):
            with state.pending.resumed():
                state.pending.drop()
                if isinstance(state, Scattering) and state.all_reduce is not None:
                    state.all_reduce.drop()
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

    def _taken(
        self, params: Sequence[ShardedParam], held: Sequence[torch.dtype | None]
    ) -> list[torch.Tensor | None]:
        """Take what of some parameters is not reduced yet, ``None`` where there is nothing."""
        grads = take_all_unsharded(params)
        for index, dtype in enumerate(held):
            if dtype is not None:
                grads[index] = self.unreduced.with_earlier(params[index], grads[index])
        for index, param in enumerate(params if self._settings.fills_unused else ()):
            is_gathered = param.unsharded is not None and not param.is_subclass
            if grads[index] is None and is_gathered and param.sharded.requires_grad:
                grads[index] = torch.zeros_like(param.unsharded_local(), requires_grad=False)
        return grads

    def _start_parts(
        self,
        params: Sequence[ShardedParam],
        held: list[torch.dtype | None],
        grads: list[torch.Tensor | None],
    ) -> list[_Part]:
        """Sort gradients into buckets, and copy those that cannot be sent as they are.

        Collective: what is not agreed yet; see :class:`GradientCodecs` and _agree_on_dtypes.
        """
        self._codecs.agree(params, grads)
        self._planner.look_at(params)
        if self._planner.take_any:
            self._agree_on_dtypes(self._planner.take_any, grads, held)
        for index in self._planner.rounded_first:
            grad = grads[index]
            grads[index] = None if grad is None else narrowed(params[index], grad)
        launch, plans = self._channel.reduce_scatter, self._planner.plans_of(params, held)
        kind = {"widens": launch.widens, "reads_padding": launch.reads_padding}
        return [
            _Part(plan, plan.bucket.start_reduce(plan.enter(grads), **kind), 1.0) for plan in plans
        ]

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
        with torch.no_grad(), run_beside(stream):
            part.plan.clear_gaps(result)
            hook(result)

    def _add_held(self, part: _Part) -> list[torch.Tensor]:
        """Add the gradients that earlier reductions left to be averaged over the replicas.

        Returns:
            Them, whose memory is read.
        """
        plan, added = part.plan, dict[ShardedParam, torch.Tensor]()
        shards = plan.shards(part.transfer.result)
        for index, ((param, name), shard) in enumerate(zip(plan.members, shards, strict=True)):
            held = unreplicated(param)
            if held is not None:
                param.sharded.grad = None
                added[param] = held
            elif (held := added.get(param)) is None:  # of a subclass, every inner tensor is added
                continue
            shard.add_(inner_of(held, name).to(shard.device))
            plan.bucket.flag(part.transfer, index)
        return list(added.values())

    def _hand_out(self, part: _Part, *, is_held: bool) -> list[Callable[[], None]]:
        """Put the results on the sharded parameters.

        Args:
            part: Whose results.
            is_held: Whether they are averaged over the shards only, and wait for an all-reduce.

        Returns:
            What does so at the end of the backward, for results that are on their way to the host,
            or of which it is not known yet whether any rank had them: looking at a flag earlier
            would wait for the device. Hooks of the user's are not kept waiting.
        """
        plan = part.plan
        dtypes = [plan.bucket.dtype] * len(plan.members) if is_held else plan.grad_dtypes()
        wanted = self._wanted(part, is_held=is_held)
        shards = plan.converted_shards(part.transfer.result, dtypes)
        give = partial(self._give, plan, wanted, shards, dtypes, is_held=is_held)
        is_late = plan.is_on_host or (wanted is not None and wanted.is_on_its_way)
        if is_late and (is_held or not any(has_hooks(param) for param, _ in plan.members)):
            return [give]
        if is_late:
            host.settle()
        give()
        return []

    def _wanted(self, part: _Part, *, is_held: bool) -> _Wanted | None:
        """Return which members get a gradient: those that any rank had; ``None`` for all.

        Hazard: a hook may reduce over ranks that only it knows, which decide the same neither by
        flags nor by the values of their shards. Guard: with a hook all members get one, but where
        no rank has seen yet what that of a subclass is made of. Test:
        ``test_shards_and_replicas_of_a_hook_stay_the_same``.
        """
        if self._settings.hook is not None and not is_held:
            known = [self._codecs.know(param) for param, _ in part.plan.members]
            return None if all(known) else _Wanted(torch.tensor(known), is_on_its_way=False)
        has = part.plan.bucket.anybody_has(part.transfer)
        if has is None:
            return None
        is_on_its_way = _torch.has_streams(self._mesh.device)
        return _Wanted(host.download(has) if is_on_its_way else has, is_on_its_way)

    def _give(
        self,
        plan: ReductionPlan,
        wanted: _Wanted | None,
        shards: Sequence[torch.Tensor],
        dtypes: list[torch.dtype],
        *,
        is_held: bool,
    ) -> None:
        """Put what has arrived on the sharded parameters."""
        chosen = [True] * len(shards) if wanted is None else wanted.flags.bool().tolist()
        if plan.params is not None and all(chosen) and not is_held:
            deliver_all(plan.params, shards, plan.specs(dtypes))
            return
        for param, shard in self._rebuilt(plan, chosen, shards, dtypes):
            if not is_held:
                deliver(param, shard)
                continue
            if unreplicated(param) is None:  # what autograd has written since the launch
                settled(param, keeps_partial=False)
                hold_for_replicas(param)
            if (present := unreplicated(param)) is None:
                set_unreplicated(param, shard)
            else:
                present.add_(shard.to(present.device))

    def _rebuilt(
        self,
        plan: ReductionPlan,
        wanted: Sequence[bool],
        shards: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
        """Yield each parameter that gets a gradient with it; subclasses of their inner tensors."""
        inner: dict[ShardedParam, dict[str, torch.Tensor]] = {}
        for place, ((param, name), shard) in enumerate(zip(plan.members, shards, strict=True)):
            if not wanted[place]:
                continue
            if name is None:
                yield param, shard
                continue
            codec, parts = self._codecs.of(param), inner.setdefault(param, {})
            assert codec is not None
            parts[name] = shard.clone()  # subclasses may demand equal storage offsets
            if len(parts) == len(codec.names):
                yield param, codec.rebuild(parts).to(dtypes[place])

    def _deliver_alone(self, params: Sequence[ShardedParam]) -> None:
        """Hand out gradients that no other rank has a part in, as :meth:`_hand_out` does."""
        params, held = to_reduce_and_held(params)
        deliveries: list[Callable[[], None]] = []
        scale = self._settings.divisor
        for param, grad in zip(params, self._taken(params, held), strict=True):
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
        if deliveries:
            self._move_to(Returning(deliveries))


def _is_summed_at_once(param: ShardedParam) -> bool:
    """Tell whether a gradient of one rank alone may be added to what users see, as precisely."""
    dtype = param.reduction_dtype()
    final = param.final_grad_dtype(dtype)
    return not has_hooks(param) and torch.promote_types(dtype, final) == final


def _widest(heard: dict[int, list[torch.dtype | None]]) -> list[torch.dtype | None]:
    return [promoted(dtypes) for dtypes in zip(*heard.values(), strict=True)]


# From the gradients that autograd leaves on unsharded parameters to those the optimizer sees ------


class GroupGradients:
    """Accumulates, reduces and hands out the gradients of one group.

    Attributes:
        have_replicas: Whether some are reduced over replicas, too.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        channels: Sequence[Channel],
        settings: ReductionSettings,
    ) -> None:
        self._params = list(params)
        self._settings = settings
        self._meshes = [
            MeshGradients([p for p in params if p.mesh == channel.mesh], channel, settings)
            for channel in channels
        ]
        self.have_replicas = any(channel.mesh.num_replicas > 1 for channel in channels)

    @property
    def are_to_reduce(self) -> bool:
        """Whether a reduction takes in any of them, which all ranks tell alike."""
        return bool(to_reduce(self._params))

    def next_plans(self) -> list[list[ReductionPlan]]:
        """Return for each channel the ways of the next reduction. Collective: none."""
        return [one.next_plans() for one in self._meshes]

    def leave_unsynced(self) -> None:
        """Note that the next reduction takes in what is trained now, whatever is frozen then."""
        for param in to_reduce(self._params):
            note_unsynced(param)

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

    def divide_by(self, divisor: float) -> None:
        """Set what sums over all ranks are divided by, also what is not reduced yet of them.

        Raises:
            ShardError: If some of that was added to a gradient that is divided already; on all
                ranks.

        Collective: none.
        """
        self.finish()
        rescaled = list[tuple[torch.Tensor, float]]()
        for param in self._params:
            ratio = (self._settings.divisor or param.mesh.num_ranks) / divisor
            grad = param.sharded.grad
            if ratio == 1 or grad is None or not param.is_unsynced:
                continue
            if param.adds_to_synced:
                raise ShardError(
                    f"Expected the gradient of '{param.name}' to be reduced, or cleared, before "
                    "what it is divided by changes, got one that was accumulated without sync and "
                    "added to one that had been reduced; call synchronize_gradients() or "
                    "zero_grad() first"
                )
            rescaled.append((_torch.local_tensor(grad), ratio))
        with torch.no_grad():
            for local, ratio in rescaled:
                local.mul_(ratio)
        self._settings.divisor = divisor

    def wait(self) -> None:
        """Wait for what was launched last; what comes of it is left to the methods below."""
        for one in self._meshes:
            if (pending := one.pending) is not None:
                pending.wait()

    @property
    def go_to_host(self) -> bool:
        """Whether results are copied to the host beside compute."""
        return any(copies_beside_compute(p.offload, p.mesh.device) for p in self._params)

    @property
    def is_all_reducing(self) -> bool:
        """Whether a reduction over the replicas has been launched."""
        return self.have_replicas and any([one.is_all_reducing for one in self._meshes])

    def start_all_reduce(self) -> bool:
        """Go on to the reduction over the replicas; return whether there is one."""
        return any([one.start_all_reduce() for one in self._meshes])

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        for one in self._meshes:
            one.finish()

    def start_return(self) -> bool:
        """Wait for the launched reduction; return whether results are on their way to the host."""
        return any([one.start_return() for one in self._meshes])

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
