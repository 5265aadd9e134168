"""One step of a sharded model, run without memory on a few ranks that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import _torch
from composable_shard.core.bucket import ParamBucket
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.core.transport.collectives import (
    AllGatherLaunch,
    ReduceScatterLaunch,
    Tensors,
)
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError
from composable_shard.insight.group_plan import GroupPlan, MeshPlan, read_group
from composable_shard.insight.group_traffic import StepTraffic, Traffic, step_traffic
from composable_shard.insight.live_bytes import (
    Live,
    LiveBytes,
    OptimizerBytes,
    OptimizerFactory,
    optimizer_bytes,
    shards_of,
)
from composable_shard.module import group_of

# What is asked of ``estimate``, checked before anything is built ----------------------------------

NEIGHBOURS = 2
"""From how many ranks the rehearsing ones gather, for any number of neighbours."""

Shard = Callable[[nn.Module, DeviceMesh], object]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Ranks:
    """A mesh of ``num_replicas`` times ``num_shards`` ranks.

    Attributes:
        num_replicas: Ranks that hold the same shards.
        num_shards: Ranks that share each parameter.
        is_hybrid: Whether the mesh has an axis for the replicas.
        num_neighbours: What ``reshard_after_forward`` is, if it is a number of ranks between.
    """

    num_replicas: int
    num_shards: int
    is_hybrid: bool
    num_neighbours: int | None

    @property
    def rehearsing(self) -> tuple[int, int]:
        """Replicas and shards of the smallest mesh on which a step takes the same course."""
        shards = min(self.num_shards, 2) if self.num_neighbours is None else 2 * NEIGHBOURS
        return min(self.num_replicas, 2), shards


@dataclass(frozen=True)
class Question:
    """How to build, shard and train the model.

    Attributes:
        build_model: Makes it.
        shard: Applies ``fully_shard`` to it.
        batch: What one rank's forward takes, or a function that makes it.
        loss: Makes a scalar of the output and the batch.
        optimizer: Makes the optimizer.
        is_accelerator: Whether it is for an accelerator rather than the CPU.
    """

    build_model: Callable[[], nn.Module]
    shard: Shard
    batch: Any
    loss: Loss
    optimizer: OptimizerFactory | None
    is_accelerator: bool


def checked_ranks(mesh_shape: object, reshard_after_forward: Any) -> Ranks:
    """Return the mesh that is asked for.

    Raises:
        ValueError: If it is no number of ranks, nor ``(replicas, shards)``, or cannot be divided.
    """
    shape: Any = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    is_shape = isinstance(shape, (tuple, list)) and len(shape) in (1, 2)
    if not is_shape or not all(map(_is_count, shape)):
        raise ValueError(
            f"Expected mesh_shape to be a number of ranks or (replicas, shards), got {mesh_shape!r}"
        )
    num_shards = shape[-1]
    neighbours = reshard_after_forward if _is_count(reshard_after_forward) else None
    if neighbours is not None and num_shards % neighbours:
        raise ValueError(
            "Expected reshard_after_forward to divide the number of shards, got "
            f"{neighbours} for {num_shards} shards"
        )
    if neighbours in (1, num_shards):
        neighbours = None
    is_hybrid = len(shape) == 2
    return Ranks(shape[0] if is_hybrid else 1, num_shards, is_hybrid, neighbours)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def checked_speeds(
    flops: float | None,
    bandwidth: float | None,
    replica_bandwidth: float | None,
    latency: float,
) -> Speeds | None:
    """Return the speeds, ``None`` if none are given.

    Raises:
        ValueError: If only some are given, or one is not positive.
    """
    if flops is None and bandwidth is None:
        return None
    if flops is None or bandwidth is None:
        raise ValueError(
            "Expected both flops and bandwidth, or neither, got "
            f"flops={flops!r} and bandwidth={bandwidth!r}"
        )
    other = bandwidth if replica_bandwidth is None else replica_bandwidth
    if min(flops, bandwidth, other) <= 0 or latency < 0:
        raise ValueError(
            "Expected positive speeds and a latency of at least 0, got "
            f"flops={flops!r}, bandwidth={bandwidth!r}, replica_bandwidth={other!r}, "
            f"latency={latency!r}"
        )
    return Speeds(float(flops), float(bandwidth), float(other), float(latency))


def rehearsing_arguments(ranks: Ranks, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``fully_shard`` that mean on few ranks what they mean on many."""
    reshard = kwargs.get("reshard_after_forward")
    if not _is_count(reshard):
        return dict(kwargs)
    if ranks.num_neighbours is not None:
        meant: bool | int = NEIGHBOURS
    else:
        meant = reshard == ranks.num_shards and ranks.num_shards > 1
    return {**kwargs, "reshard_after_forward": meant}


def check_no_process_group() -> None:
    """Raise ``ShardError`` if this process has a process group, which must not be disturbed."""
    if dist.is_initialized():
        raise ShardError(
            "Expected estimate in a process without a process group, got one of backend "
            f"'{dist.get_backend()}'; call it before init_process_group, or in a process of its own"
        )


def default_loss(output: Any, batch: Any) -> torch.Tensor:
    """Take the ``loss`` of an output that has one, else the sum of a tensor.

    Raises:
        TypeError: If it is neither.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            "Expected forward to return a tensor, or an output with a loss, got "
            f"{type(output).__name__}; pass loss=, a function of the output and the batch"
        )
    return output.sum()


# Building, sharding and running a model without memory, on few ranks that are not there -----------


@dataclass(frozen=True)
class Rehearsal:
    """What was found out.

    Attributes:
        moments: A step.
        groups: The plans of all groups, for the number of ranks that was asked for.
        num_parameters: Elements of all parameters.
        unsharded: Bytes of what is not sharded: parameters, buffers, the batch.
        optimizer: What the optimizer needs for the shards on the device.
        offloaded_optimizer: The same for those on the CPU.
    """

    moments: tuple[Moment, ...]
    groups: tuple[GroupPlan, ...]
    num_parameters: int
    unsharded: int
    optimizer: OptimizerBytes
    offloaded_optimizer: OptimizerBytes


def rehearse(question: Question, ranks: Ranks) -> Rehearsal:
    """Run a step without memory; see :func:`composable_shard.estimate` for what it raises."""
    from composable_shard.testing.ranks import fake_ranks

    replicas, shards = ranks.rehearsing
    with fake_ranks(replicas * shards):
        mesh = _mesh(ranks.is_hybrid, replicas, shards)
        fake = _torch.fake_tensors()
        with fake:
            model = question.build_model()
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"Expected build_model to return an nn.Module, got {type(model).__name__}"
                )
            _take_off_meta(model)
            question.shard(model, mesh)
        groups = _groups_of(model)
        for context in dict.fromkeys(group.context for group in groups):
            context.before_gather()  # it compares numbers, which fake tensors do not have
        silence(groups, widens=not question.is_accelerator)
        with fake:
            try:
                return _run(question, ranks, model, groups)
            except _torch.ReadsValues as error:
                error.add_note(
                    "estimate runs the model on tensors without values, and something in it, or in "
                    "the loss, asks one for its value"
                )
                raise


def _mesh(is_hybrid: bool, replicas: int, shards: int) -> DeviceMesh:
    if not is_hybrid:
        return init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def _take_off_meta(model: nn.Module) -> None:
    """Replace what is on the meta device by tensors that pass for real, ties kept."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if tensor not in made:
                    like = torch.empty_like(tensor, device="cpu")
                    is_param = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(like, tensor.requires_grad) if is_param else like
                held[name] = made[tensor]  # type: ignore[assignment]


def _groups_of(model: nn.Module) -> list[ParamGroup]:
    found = (group_of(module) for module in model.modules())
    groups = list(dict.fromkeys(group for group in found if group is not None))
    if not groups:
        raise ValueError(
            f"Expected shard to apply fully_shard to {type(model).__name__}, got no sharded module"
        )
    for group in groups:
        for unit in group.units.members:
            if not isinstance(unit, ParamBucket):
                raise ValueError(
                    "Expected plain parameters, which can be laid out for any number of ranks, got "
                    "a tensor subclass; estimate the model before its parameters are converted"
                )
        for param in group.params:
            if not _is_known(param, group):
                raise ValueError(
                    "Expected parameters over the shards of the mesh, or over all of it, got "
                    f"'{param.name}' over others; estimate knows one axis of shards and one of "
                    "replicas"
                )
    return groups


def _is_known(param: ShardedParam, group: ParamGroup) -> bool:
    axes = param.mesh.mesh.mesh_dim_names
    return param.mesh == group.mesh and param.placement.model is None and axes != ("replicate",)


def _run(
    question: Question, ranks: Ranks, model: nn.Module, groups: Sequence[ParamGroup]
) -> Rehearsal:
    names = {module: name for name, module in model.named_modules()}
    batch = question.batch() if callable(question.batch) else _torch.without_memory(question.batch)
    sharded = [param.sharded for group in groups for param in group.params]
    ours = {id(tensor) for tensor in sharded}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in ours]
    lasting = [*others, *_torch.tensors_of(batch)]
    locals_ = [param.local for group in groups for param in group.params]

    def run() -> None:
        question.loss(_call(model, batch), batch).backward()
        model.zero_grad()

    record = record_step(groups, [*lasting, *locals_], run)
    plans = tuple(
        _placed(read_group(group, group.name, names), question).over(
            ranks.num_shards, ranks.num_replicas, ranks.num_neighbours or 1
        )
        for group in groups
    )
    resident, offloaded = _optimizers(question, ranks, record.used)
    return Rehearsal(
        record.moments,
        plans,
        sum(param.numel() for param in model.parameters()),
        sum(tensor.numel() * tensor.itemsize for tensor in lasting),
        resident,
        offloaded,
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _placed(plan: GroupPlan, question: Question) -> GroupPlan:
    """Say of each buffer whether it is on the CPU and compute is not."""

    def placed(mesh: MeshPlan) -> MeshPlan:
        gathers = []
        for bucket in mesh.buckets:
            is_away = bucket.offloads and question.is_accelerator
            gathers.append(replace(bucket, crosses=is_away, offloads=is_away))
        reductions = []
        for one in mesh.reductions:
            is_away = one.offloads and question.is_accelerator
            reductions.append(replace(one, crosses=is_away, offloads=is_away))
        return replace(mesh, gathers=tuple(gathers), reductions=tuple(reductions))

    return replace(plan, meshes=tuple(map(placed, plan.meshes)))


def _optimizers(
    question: Question, ranks: Ranks, params: Iterable[ShardedParam]
) -> tuple[OptimizerBytes, OptimizerBytes]:
    found = []
    for is_away in (False, True):
        some = [p for p in params if (p.offload is not None and question.is_accelerator) is is_away]
        shards = shards_of(some, ranks.num_shards)
        if question.optimizer is None or not shards:
            found.append(OptimizerBytes(0, 0))
            continue
        at_once = question.is_accelerator and not is_away
        found.append(optimizer_bytes(question.optimizer, shards, at_once=at_once))
    return found[0], found[1]


# One step of a sharded model, run without memory on a few ranks that are not there ----------------


@dataclass(frozen=True)
class Moment:
    """An event of a group, and what happened since the one before.

    Attributes:
        event: Which; empty at the end of the step.
        group: The place of the group; -1 at the end.
        peak: The most that lived since.
        flops: Floating-point operations since.
    """

    event: str
    group: int
    peak: Live
    flops: int


@dataclass(frozen=True)
class Record:
    """What happened in a step.

    Attributes:
        moments: In order; the last one is the end.
        used: The parameters that got a gradient.
    """

    moments: tuple[Moment, ...]
    used: frozenset[ShardedParam]


class SilentAllGather(AllGatherLaunch):
    """Sends nothing, and leaves the output as it was."""

    def launch(self, outputs: Tensors, inputs: Tensors, group: Any, tag: int) -> list[Waitable]:
        """Return at once."""
        return []


class SilentReduceScatter(ReduceScatterLaunch):
    """Sends nothing, and leaves the output as it was."""

    def __init__(self, *, widens: bool) -> None:
        self.widens = widens

    def averages(self, group: Any, device: torch.device) -> bool:
        """Divide nothing by operations."""
        return True

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: Any, op: Any, tag: int
    ) -> list[Waitable]:
        """Return at once."""
        return []


def silence(groups: Sequence[ParamGroup], *, widens: bool) -> None:
    """Let groups communicate with nobody."""
    for group in groups:
        for channel in group.channels.values():
            channel.all_gather = SilentAllGather()
            channel.reduce_scatter = SilentReduceScatter(widens=widens)


def record_step(
    groups: Sequence[ParamGroup], lasting: Sequence[torch.Tensor], run: Callable[[], None]
) -> Record:
    """Run a step twice and return what happens in the second one, which knows the order.

    Args:
        groups: All groups.
        lasting: Tensors that live before and after.
        run: Does forward and backward, and clears the gradients.
    """
    live = LiveBytes()
    live.ignore(lasting)
    with live:
        run()
        live.forget()
        with _Recorder(groups, live) as recorder:
            run()
    moments = (*recorder.moments, Moment("", -1, live.peak, live.flops))
    return Record(moments, frozenset(recorder.used))


class _Recorder(contextlib.AbstractContextManager[Any]):
    """Notes the events of groups, with what happened between them."""

    def __init__(self, groups: Sequence[ParamGroup], live: LiveBytes) -> None:
        self.moments: list[Moment] = []
        self.used: set[ShardedParam] = set()
        self._groups = list(groups)
        self._live = live
        self._grads: dict[int, list[torch.Tensor]] = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> _Recorder:
        for context in dict.fromkeys(group.context for group in self._groups):
            places = {g.name: i for i, g in enumerate(self._groups) if g.context is context}
            context.listener = lambda event, name, places=places: self._saw(event, places[name])
            self._hooks.callback(setattr, context, "listener", None)
        for tensor in self._unsharded(range(len(self._groups))):
            if tensor.requires_grad:
                handle = tensor.register_hook(self._live.call_gradient)
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _unsharded(self, places: Sequence[int]) -> Iterator[torch.Tensor]:
        for place in places:
            for param in self._groups[place].params:
                if param.unsharded is not None:
                    yield param.unsharded

    def _saw(self, event: str, place: int) -> None:
        if event == "post_backward":
            grads = [t.grad for t in self._unsharded([place]) if t.grad is not None]
            for grad in grads:
                self._live.call_gradient(grad)
            self.used.update(
                param
                for param in self._groups[place].params
                if param.unsharded is not None and param.unsharded.grad is not None
            )
            self._grads[place] = grads
        elif event == "reduce_scatter":
            self._live.hand_over(self._grads.pop(place, []))
        live = self._live
        self.moments.append(Moment(event, place, live.peak, live.flops))
        live.restart()


# The most bytes a rank holds at once: a recorded step, with the sizes of any number of ranks ------


@dataclass(frozen=True)
class MemorySplit:
    """Bytes on the device of compute, of one rank at one moment.

    Attributes:
        shards: Its shards of the parameters.
        gradients: Gradients: as autograd leaves them, on their way, and reduced.
        optimizer: The state of the optimizer, and what its step needs besides.
        gathered: Unsharded parameters, and what gathers need besides.
        activations: What compute made and still needs.
        unsharded: Parameters and buffers that are not sharded, and the batch.
    """

    shards: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    unsharded: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class GroupSizes:
    """What a group occupies at its moments, in bytes.

    Attributes:
        gathered: Its unsharded parameters.
        staging: What a gather under way needs besides.
        kept: The part that is kept to regather from, if it is.
        given: Gradients that are sent from where autograd left them.
        made: What is made to send the others.
        result: What the reduction writes.
        final: Its gradients as the optimizer finds them.
        final_elsewhere: Those of them that are kept on the CPU.
        has_second_stage: Whether an all-reduce follows.
    """

    gathered: int
    staging: int
    kept: int
    given: int
    made: int
    result: int
    final: int
    final_elsewhere: int
    has_second_stage: bool


def sizes_of(group: GroupPlan) -> GroupSizes:
    """Return what a group occupies."""
    gathers = [bucket for mesh in group.meshes for bucket in mesh.buckets]
    every = [one for mesh in group.meshes for one in mesh.reductions]
    sent = [one for mesh in group.meshes for one in mesh.reductions if not mesh.is_alone]
    regathers = group.residence.in_backward == "regathered"
    gathered = sum(bucket.unsharded_nbytes for bucket in gathers)
    return GroupSizes(
        gathered=gathered,
        staging=sum(bucket.staging_nbytes for bucket in gathers),
        kept=gathered // group.residence.num_neighbours if regathers else 0,
        given=sum(one.input_nbytes(is_left_by_autograd=True) for one in sent),
        made=sum(one.input_nbytes(is_left_by_autograd=False) for one in sent),
        result=sum(one.result_nbytes for one in sent),
        final=sum(one.final_nbytes for one in every if not one.offloads),
        final_elsewhere=sum(one.final_nbytes for one in every if one.offloads),
        has_second_stage=any(mesh.num_replicas > 1 for mesh in group.meshes),
    )


class MemoryCurve:
    """Goes through the moments of a step and remembers the fullest.

    Attributes:
        peak: What was held then.
        peak_at: The group that was next, and its event.
        elsewhere: Bytes of reduced gradients on the CPU.
    """

    def __init__(self, sizes: Sequence[GroupSizes], lasting: MemorySplit) -> None:
        self.peak = lasting
        self.peak_at = ("", -1)
        self.elsewhere = 0
        self._sizes = sizes
        self._lasting = lasting
        self._gathered: dict[int, int] = {}
        self._staging: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        self._reached: set[int] = set()  # by backward

    def follow(self, moments: Sequence[Moment]) -> None:
        """Go through all moments of a step."""
        for moment in moments:
            self._look(moment, moment.peak.activations, moment.peak.gradients)
            if moment.group >= 0:
                self._happen(moment)

    def stepping(self, besides: int) -> MemorySplit:
        """Return what is held while the optimizer steps, which needs some bytes besides."""
        now = self._now(0, 0)
        return replace(now, optimizer=now.optimizer + besides)

    def _now(self, activations: int, raw_gradients: int) -> MemorySplit:
        gathered = (self._gathered, self._staging, self._kept)
        gradients = (self._in_flight, self._reduced)
        return replace(
            self._lasting,
            gathered=sum(sum(held.values()) for held in gathered),
            gradients=raw_gradients + sum(sum(held.values()) for held in gradients),
            activations=activations,
        )

    def _look(self, moment: Moment, activations: int, raw_gradients: int) -> None:
        now = self._now(activations, raw_gradients)
        if now.total > self.peak.total:
            self.peak, self.peak_at = now, (moment.event, moment.group)

    def _happen(self, moment: Moment) -> None:
        group, sizes = moment.group, self._sizes[moment.group]
        match moment.event:
            case "all_gather":
                self._gathered[group], self._staging[group] = sizes.gathered, sizes.staging
            case "wait_for_all_gather":
                for ended in (self._staging, self._kept):
                    ended.pop(group, None)
            case "pre_backward":
                self._reached.add(group)
            case "reshard":
                self._reshard(moment, sizes)
            case "reduce_scatter":
                self._launch(moment, sizes)
            case "wait_for_reduce_scatter":
                if sizes.has_second_stage:
                    self._in_flight[group] = sizes.result
                else:
                    self._deliver(moment, sizes)
            case "wait_for_all_reduce":
                self._deliver(moment, sizes)

    def _reshard(self, moment: Moment, sizes: GroupSizes) -> None:
        group = moment.group
        if sizes.kept and group not in self._reached:
            self._kept[group] = sizes.kept
            self._look(moment, *moment.peak)
        for freed in (self._gathered, self._staging):
            freed.pop(group, None)

    def _launch(self, moment: Moment, sizes: GroupSizes) -> None:
        """Gradients are packed while they are all there, then those that were copied are freed."""
        group = moment.group
        if not sizes.result:  # nobody else has a part in them
            self._deliver(moment, sizes)
            return
        self._in_flight[group] = sizes.made + sizes.result
        self._look(moment, moment.peak.activations, moment.peak.gradients)
        self._in_flight[group] = sizes.given + sizes.made + sizes.result

    def _deliver(self, moment: Moment, sizes: GroupSizes) -> None:
        group = moment.group
        self._in_flight.pop(group, None)
        if sizes.result and sizes.final != sizes.result:  # both are there while it is cast
            self._reduced[group] = sizes.final + sizes.result
            self._look(moment, *moment.peak)
        self._reduced[group] = sizes.final
        self.elsewhere += sizes.final_elsewhere


# How long a step takes, if compute and communication each run at one speed beside each other ------


@dataclass(frozen=True)
class Speeds:
    """What the user says of the devices.

    Attributes:
        flops: Floating-point operations that a device does in a second.
        bandwidth: Bytes that a rank sends in a second to those that share its parameters.
        replica_bandwidth: The same to those that hold the same shards.
        latency: Seconds that a launch takes besides.
    """

    flops: float
    bandwidth: float
    replica_bandwidth: float
    latency: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, without the optimizer, whose speed is that of memory.

    Attributes:
        compute: If nothing had to be sent.
        communication: If nothing had to be computed.
        exposed: Communication that compute waits for.
        step: Compute and exposed communication.
    """

    compute: float
    communication: float
    exposed: float
    step: float


def time_of(moments: Sequence[Moment], groups: Sequence[GroupPlan], speeds: Speeds) -> StepTime:
    """Replay a recorded step: one lane computes, one communicates, each in order.

    Args:
        moments: The step.
        groups: What each group sends.
        speeds: How fast.
    """
    traffics = [step_traffic(group) for group in groups]
    compute = clock = lane = communication = 0.0
    done: dict[tuple[int, str], float] = {}
    is_backward = False
    for moment in moments:
        seconds = moment.flops / speeds.flops
        compute, clock = compute + seconds, clock + seconds
        group, event = moment.group, moment.event
        is_backward = is_backward or event == "pre_backward"
        if event in ("all_gather", "reduce_scatter", "all_reduce"):
            sent = _sent(traffics[group], event, is_backward=is_backward)
            rate = speeds.replica_bandwidth if event == "all_reduce" else speeds.bandwidth
            seconds = sent.launches * speeds.latency + (sent.nbytes or 0) / rate
            communication += seconds
            lane = done[group, event] = max(lane, clock) + seconds
        elif event.startswith("wait_for_"):
            clock = max(clock, done.pop((group, event.removeprefix("wait_for_")), 0.0))
    return StepTime(compute, communication, clock - compute, clock)


def _sent(traffic: StepTraffic, event: str, *, is_backward: bool) -> Traffic:
    if event == "reduce_scatter":
        return traffic.reductions
    if event == "all_reduce":
        return traffic.all_reduces
    return traffic.backward_gathers if is_backward else traffic.forward_gathers
