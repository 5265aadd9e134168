"""``estimate``: memory, communication and time of a step on devices that need not exist.

The model is built, sharded and run without memory, on the first of ranks that do not exist.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import _torch, core
from composable_shard.arguments import (
    check_function,
    check_type,
    check_value,
    checked_device,
    checked_number,
)
from composable_shard.core import hooks, nested, optimizers, reduction, storage
from composable_shard.core.group import ParamGroup
from composable_shard.core.storage import FlatBucket, ShardedParam
from composable_shard.core.transport.collectives import ReduceScatterLaunch, WaitThenCall
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError
from composable_shard.insight.events import groups_in, listening
from composable_shard.insight.explain import is_repeated_block
from composable_shard.insight.group_steps import StepTraffic, stored_in, traffic_of
from composable_shard.insight.report import (
    Report,
    Section,
    Table,
    count_text,
    counted,
    nbytes_text,
    seconds_text,
)
from composable_shard.train.wrap import Policy, apply_fully_shard

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# The result of ``estimate``: plain values, and their texts ----------------------------------------


@dataclass(frozen=True)
class MemorySplit:
    """Bytes on the device of compute, of one rank at one moment.

    Attributes:
        shards: Its shards of the parameters.
        gradients: Gradients: from autograd, in flight, and reduced.
        optimizer: The states of the optimizer, and the other memory of its step.
        gathered: Unsharded parameters, and the other memory of gathers.
        activations: Tensors that compute made and still needs.
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
        """The sum of all parts."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, without the optimizer, which is as fast as memory.

    Attributes:
        compute: The time of compute alone.
        communication: The time of communication alone.
        exposed: Communication that compute waits for.
        step: Compute and exposed communication.
    """

    compute: float
    communication: float
    exposed: float
    step: float


@dataclass(frozen=True)
class Estimate(Report):
    """The memory, communication and time of one rank in a step.

    Attributes:
        mesh_shape: ``(replicas, shards)``.
        num_parameters: Elements of all parameters.
        num_groups: Groups that have parameters.
        peak: The peak of a rank's device memory in a step.
        peak_at: The moment of the peak.
        between_steps: The memory between steps, with gradients cleared.
        on_cpu: Bytes on the CPU, if parameters are offloaded.
        traffic: The traffic of a rank in a step, without the optimizer.
        flops: Floating-point operations of a rank in forward and backward.
        time: The time of a step, if speeds were given.
    """

    mesh_shape: tuple[int, int]
    num_parameters: int
    num_groups: int
    peak: MemorySplit
    peak_at: str
    between_steps: MemorySplit
    on_cpu: int
    traffic: StepTraffic
    flops: int
    time: StepTime | None

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.mesh_shape[0] * self.mesh_shape[1]

    def sections(self) -> list[Section]:
        """Return the tables of memory, communication and time."""
        return [self._memory(), self._communication(), self._time()]

    def _memory(self) -> Table:
        replicas, shards = self.mesh_shape
        ranks = f"{shards} shards" + (f" x {replicas} replicas" if replicas > 1 else "")
        groups = counted(self.num_groups, "group")
        title = f"{count_text(self.num_parameters)} parameters in {groups} over {ranks}"
        peak, between = ({**vars(at), "total": at.total} for at in (self.peak, self.between_steps))
        if self.on_cpu:
            peak["on the CPU"] = between["on the CPU"] = self.on_cpu
        rows = [(name, nbytes_text(peak[name]), nbytes_text(between[name])) for name in peak]
        headings = ("bytes of a rank", f"at the peak ({self.peak_at})", "between steps")
        return Table(title, headings, rows)

    def _communication(self) -> Table:
        parts = {**self.traffic.parts, "total": self.traffic.total}
        rows = [(n, p.launches, p.messages, nbytes_text(p.nbytes)) for n, p in parts.items()]
        headings = ("a step", "launches", "messages", "bytes that a rank sends")
        return Table("Communication", headings, rows)

    def _time(self) -> Table:
        labels = "compute", "communication", "exposed communication", "step"
        seconds = () if self.time is None else vars(self.time).values()
        rows = [("floating-point operations of a rank", count_text(self.flops))]
        rows += zip(labels, map(seconds_text, seconds), strict=False)
        return Table("Forward and backward", ("", "amount"), rows)


# From the arguments to the result ----------------------------------------------------------------


def default_loss(output: Any, batch: Any) -> torch.Tensor:
    """Return the ``loss`` of an output that has one, else the sum of a tensor.

    Raises:
        TypeError: If the output has no loss and is no tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(output, torch.Tensor):
        kind = type(output).__name__
        raise TypeError(f"Expected forward to return a tensor or a loss, got {kind}; pass loss=")
    return output.sum()


def estimate(
    build_model: Callable[[], nn.Module],
    mesh_shape: int | tuple[int, ...],
    policy: Policy | None = None,
    batch: Any = None,
    *,
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] = default_loss,
    optimizer: OptimizerFactory | None = torch.optim.AdamW,
    device: str = "cuda",
    flops: float | None = None,
    bandwidth: float | None = None,
    replica_bandwidth: float | None = None,
    latency: float = 0.0,
    **kwargs: Any,
) -> Estimate:
    """Estimate the memory, communication and time of a step on 1 to 100,000 ranks, without ranks.

    The model is built, sharded and run with tensors that have no memory, as the first of the ranks.
    Its allocations, operations and messages are recorded. So the time of an estimate hardly grows
    with the number of ranks.

    Args:
        build_model: Makes the model; its parameters are not allocated.
        mesh_shape: The number of ranks, or ``(replicas, shards)``.
        policy: Picks the modules that get their own group, as for :func:`apply_fully_shard`; by
            default modules that are repeated in lists.
        batch: The inputs of one rank's forward: a tensor, a tuple of arguments, a dict of keyword
            arguments, or a function that makes one. Only shapes and dtypes count, so tensors on the
            meta device suffice.
        shard: Instead of ``policy``, a function of the model and the mesh that applies
            ``fully_shard``.
        loss: Makes a scalar of output and batch; by default the ``loss`` of the output if it has
            one, else the sum of its elements.
        optimizer: Makes the optimizer of some parameters; ``None`` leaves it out.
        device: ``"cpu"``, or the type of an accelerator.
        flops: Floating-point operations of a device per second. With ``bandwidth``, adds the time
            of a step.
        bandwidth: Bytes that a rank sends per second.
        replica_bandwidth: The same between replicas; by default ``bandwidth``.
        latency: Additional seconds per launch of a collective.
        kwargs: Arguments of ``fully_shard``, such as ``mp_policy`` and ``reshard_after_forward``.

    Returns:
        An :class:`Estimate`: ``print`` it, call ``to_dict()``, or let rich or a notebook show it.

    Raises:
        TypeError: If an argument has the wrong type, ``build_model`` returns no module, or ``loss``
            is missing.
        ValueError: If an argument is out of range, or a parameter is a tensor subclass.
        ShardError: If this process has a process group.

    Collective: none.
    Memory: that of Python objects alone.

    Example:
        >>> def build():
        ...     return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        >>> batch = torch.empty(16, 1024, device="meta")
        >>> estimate(build, 8, batch=batch).peak.shards == 8 * 1024 * 1024 * 4 // 8
        True
        >>> estimate(build, (1000, 100), batch=batch).num_ranks
        100000
    """
    check_type("build_model", build_model, callable(build_model), "a function that makes a module")
    check_function("shard", shard)
    check_type("loss", loss, callable(loss), "a function of output and batch")
    makes = optimizer is None or callable(optimizer)
    remedy = "for layouts, use explain(model, with_layout(model, layouts)) under fake_ranks"
    check_type("optimizer", optimizer, makes, "a function of parameters or None", remedy)
    device_type = checked_device("device", device).type
    shape = _checked_shape(mesh_shape)
    speeds = _checked_speeds(
        flops=flops, bandwidth=bandwidth, replica_bandwidth=replica_bandwidth, latency=latency
    )
    if dist.is_initialized():
        raise ShardError(
            f"Expected estimate before init_process_group, got backend '{dist.get_backend()}'"
        )
    check_type("batch", batch, batch is not None, "the inputs of one rank's forward")
    others = [*(["policy"] if policy is not None else []), *kwargs]
    is_alone = shard is None or not others
    check_value("shard", others, is_alone, "without policy and arguments of fully_shard")

    def shard_by_policy(model: nn.Module, mesh: DeviceMesh) -> None:
        chosen = is_repeated_block(model) if policy is None else policy
        apply_fully_shard(model, chosen, mesh=mesh, **kwargs)

    fake = _torch.fake_tensors()
    try:
        with pretended_ranks(shape, device_type) as mesh:
            with fake:
                model = build_model()
                is_module = isinstance(model, nn.Module)
                check_type("the result of build_model", model, is_module, "an nn.Module")
                (shard or shard_by_policy)(model, mesh)
                if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                    model.to_empty(device="cpu")
            rehearsal = Rehearsal(model, is_accelerator=device_type != "cpu")
            with fake:
                rehearsal.record(batch, loss)
                return _weigh(rehearsal, shape, optimizer, speeds)
    except _torch.ReadsValues as error:
        error.add_note("estimate runs on tensors without values; the model or the loss reads one")
        raise


def _checked_shape(mesh_shape: object) -> tuple[int, ...]:
    shape: Any = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    fits = isinstance(shape, (tuple, list)) and len(shape) in (1, 2)
    fits = fits and all(isinstance(n, int) and n is not True and n > 0 for n in shape)
    check_value("mesh_shape", mesh_shape, fits, "to be a number of ranks or (replicas, shards)")
    return tuple(shape)


def _weigh(
    rehearsal: Rehearsal,
    shape: tuple[int, ...],
    optimizer: OptimizerFactory | None,
    speeds: dict[str, float] | None,
) -> Estimate:
    model, params, away = rehearsal.model, rehearsal.params, rehearsal.away
    kept, offloaded = OptimizerBytes(), OptimizerBytes()
    if optimizer is not None:
        used = [param for param in params if param in rehearsal.used]  # in the user's order
        here = [param.local for param in used if param not in away]
        kept = optimizer_bytes(optimizer, here, at_once=rehearsal.is_accelerator)
        there = [param.local for param in used if param in away]
        offloaded = optimizer_bytes(optimizer, there, at_once=False)
    fullest = max(rehearsal.moments, key=lambda moment: moment.peak.total)
    peak, peak_at = replace(fullest.peak, optimizer=kept.state), "end of backward"
    if fullest.group is not None:
        peak_at = f"{fullest.event} of {fullest.group.name or 'the root'}"
    stepping = replace(rehearsal.at_end, optimizer=sum(kept))
    if stepping.total > peak.total:
        peak, peak_at = stepping, "optimizer step"
    between = MemorySplit(peak.shards, optimizer=kept.state, unsharded=peak.unsharded)
    return Estimate(
        mesh_shape=shape if len(shape) == 2 else (1, shape[0]),
        num_parameters=sum(param.numel() for param in model.parameters()),
        num_groups=sum(len({param.mesh for param in group.params}) for group in rehearsal.groups),
        peak=peak,
        peak_at=peak_at,
        between_steps=between,
        on_cpu=rehearsal.on_cpu + sum(offloaded),
        traffic=sum(map(traffic_of, rehearsal.groups), StepTraffic()),
        flops=sum(moment.flops for moment in rehearsal.moments),
        time=None if speeds is None else _time_of(rehearsal.moments, speeds),
    )


# The time of a step with compute and communication in parallel ------------------------------------


def _checked_speeds(**given: float | None) -> dict[str, float] | None:
    """Return the speeds with their defaults; ``None`` if none are given.

    Raises:
        TypeError: If a speed is no number.
        ValueError: If only some speeds are given, or a speed is not positive.
    """
    numbers = {n: checked_number(n, value) for n, value in given.items() if value is not None}
    fit = all(number > 0 or (name, number) == ("latency", 0) for name, number in numbers.items())
    check_value("speeds", numbers, fit, "to be positive, and the latency at least 0")
    both = given["flops"], given["bandwidth"]
    check_value("flops and bandwidth", both, both.count(None) != 1, "to be given both or neither")
    return None if None in both else {"replica_bandwidth": numbers["bandwidth"], **numbers}


def _time_of(moments: Iterable[Moment], speeds: Mapping[str, float]) -> StepTime:
    """Replay a recorded step: one lane computes, one communicates, each in order.

    Args:
        moments: The step.
        speeds: The arguments of :func:`estimate` that are speeds, by name.
    """
    traffic_in_step = cache(traffic_of)
    compute = clock = lane = communication = 0.0
    done: dict[tuple[ParamGroup | None, str], float] = {}
    is_backward = False
    for event, group, _, operations in moments:
        seconds = operations / speeds["flops"]
        compute, clock = compute + seconds, clock + seconds
        is_backward = is_backward or event == "pre_backward"
        if group is not None and event in ("all_gather", "reduce_scatter", "all_reduce"):
            traffic, rate = traffic_in_step(group), speeds["bandwidth"]
            sent = traffic.backward_gathers if is_backward else traffic.forward_gathers
            if event == "reduce_scatter":
                sent = traffic.reductions
            elif event == "all_reduce":
                sent, rate = traffic.all_reduces, speeds["replica_bandwidth"]
            seconds = sent.launches * speeds["latency"] + (sent.nbytes or 0) / rate
            communication += seconds
            lane = done[group, event] = max(lane, clock) + seconds
        elif event.startswith("wait_for_"):
            clock = max(clock, done.pop((group, event.removeprefix("wait_for_")), 0.0))
    return StepTime(compute, communication, clock - compute, clock)


# The bytes that live at each moment of a step without memory --------------------------------------

# An allocation of the library has a frame of the core on the stack. Frames that cast the inputs and
# outputs of modules do not count: they are part of compute.
_MAKERS = {storage.__name__: "gathered", reduction.__name__: "gradients"}
_COMPUTES = {module.__name__ for module in (hooks, nested, optimizers)}


Storage = torch.UntypedStorage


class LiveBytes(_torch.DispatchMode):
    """Follows the storages that operations make.

    Attributes:
        peak: The moment with the most bytes since the last :meth:`restart`.
        flops: Floating-point operations since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.flops = MemorySplit(), 0
        self._counted: dict[weakref.ref[Storage], tuple[str, int]] = {}
        self._resized = weakref.WeakSet[Storage]()  # memory of the library, which comes and goes
        self._totals = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        if _torch.reads_a_value(func) and _maker() != "activations":
            return 0  # no other rank has a gradient that this rank lacks
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += _torch.flops_of(func, args, kwargs, result)
        made = _torch.tensors_of(result)
        new = [one for one in made if weakref.ref(one.untyped_storage()) not in self._counted]
        if new:
            self.count(new, _maker())
        return result

    def count(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count storages from now on as a part of :class:`MemorySplit`; as ``""``, not."""
        for tensor in tensors:
            self._set(tensor.untyped_storage(), kind)
        if kind in _MAKERS.values():
            self.look()
        self.peak = max(self.peak, self.now, key=attrgetter("total"))

    def look(self) -> None:
        """Read the size of gathered memory and of gradients, which is set without an operation."""
        for memory in list(self._resized):
            kind, _ = self._counted.get(weakref.ref(memory), ("", 0))
            self._set(memory, kind)
        self.peak = max(self.peak, self.now, key=attrgetter("total"))

    def restart(self) -> None:
        """Forget the peak and the operations so far."""
        self.peak, self.flops = self.now, 0

    @property
    def now(self) -> MemorySplit:
        """The bytes that live."""
        return MemorySplit(*(self._totals[field.name] for field in fields(MemorySplit)))

    def _set(self, memory: Storage, kind: str) -> None:
        key = weakref.ref(memory, self._forget)
        before, old_nbytes = self._counted.get(key, ("", 0))
        self._counted[key] = kind, memory.nbytes()
        self._totals[before] -= old_nbytes
        self._totals[kind] += memory.nbytes()
        (self._resized.add if kind in _MAKERS.values() else self._resized.discard)(memory)

    def _forget(self, freed: weakref.ref[Storage]) -> None:
        kind, nbytes = self._counted.pop(freed)
        self._totals[kind] -= nbytes


def _maker() -> str:
    """Return the attribute of :class:`MemorySplit` for memory that the running code allocates."""
    frame: FrameType | None = sys._getframe(2)
    made = "activations"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _MAKERS:
            return _MAKERS[name]
        if name.startswith(f"{core.__name__}.") and name not in _COMPUTES:
            made = "gradients"
        frame = frame.f_back
    return made


# The memory of an optimizer for the shards of one rank --------------------------------------------


class OptimizerBytes(NamedTuple):
    """Bytes of one rank.

    Attributes:
        state: The state that it keeps from step to step.
        besides: Further bytes of a step at its peak.
    """

    state: int = 0
    besides: int = 0


def optimizer_bytes(
    factory: OptimizerFactory, like: Sequence[torch.Tensor], *, at_once: bool
) -> OptimizerBytes:
    """Let an optimizer step on shards without memory.

    Args:
        factory: Makes the optimizer.
        like: Tensors of the shapes and dtypes that one rank holds.
        at_once: Whether it steps all parameters at once, if the user has not chosen: torch's own
            optimizers do on an accelerator.

    Raises:
        ValueError: If the optimizer reads values.
    """
    if not like:
        return OptimizerBytes()
    shards = [nn.Parameter(torch.empty_like(tensor)) for tensor in like]
    optimizer = factory(shards)
    for group in optimizer.param_groups:
        if at_once and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    live = LiveBytes()
    for shard in shards:
        shard.grad = torch.empty_like(shard)
        live.count([shard, shard.grad], "")
    try:
        with live:
            optimizer.step()
            state = live.now.activations
            live.restart()
            optimizer.step()
    except _torch.ReadsValues as error:
        raise ValueError(
            f"Expected an optimizer that reads no values, got {type(optimizer).__name__}; pass "
            "another one with as much state, or optimizer=None"
        ) from error
    return OptimizerBytes(state, live.peak.activations - state)


# Building, sharding and running a model without memory --------------------------------------------


class Moment(NamedTuple):
    """An event of a group, and the work since the event before.

    Attributes:
        event: The event; empty at the end of the step.
        group: The group; ``None`` at the end.
        peak: The most bytes that lived since.
        flops: Floating-point operations since.
    """

    event: str
    group: ParamGroup | None
    peak: MemorySplit
    flops: int


@contextlib.contextmanager
def pretended_ranks(mesh_shape: tuple[int, ...], device_type: str) -> Iterator[DeviceMesh]:
    """Be the first rank of a mesh of ranks that do not exist, with devices of some type."""
    from composable_shard.testing.ranks import fake_ranks

    names = ("replicate", "shard")[-len(mesh_shape) :]
    backend = dist.Backend.default_device_backend_map.get(device_type, "nccl")
    with (
        fake_ranks(torch.Size(mesh_shape).numel()),
        _torch.pretended_backend(backend),
        _torch.poisoned_memory(False),  # which keeps memory for a while
    ):
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


class Silent(ReduceScatterLaunch):
    """A gather or reduction that sends nothing, and leaves the outputs as they were."""

    def __init__(self, *, is_widening: bool) -> None:
        # As those of the library for the CPU do.
        self.widens = self.keeps_inputs = self.allocates_late = is_widening

    def averages(self, group: Any, device: torch.device) -> bool:
        """Claim to average, so that the library divides nothing."""
        return True

    def launch(self, outputs: Any, *_: Any, **__: Any) -> list[Waitable]:
        """Return a wait that allocates the outputs."""
        return [WaitThenCall(None, partial(list, outputs))]


class Rehearsal:
    """One step of a model on the first of some ranks that do not exist.

    Attributes:
        model: The sharded model.
        groups: Its groups.
        is_accelerator: Whether the ranks have accelerators.
        params: Their parameters.
        moments: The step.
        away: The parameters with shards on the CPU while compute is on a device.
        used: The parameters that got a gradient.
        at_end: The bytes that live when all gradients are reduced.
        on_cpu: Bytes of the shards and reduced gradients of ``away``.
    """

    def __init__(self, model: nn.Module, *, is_accelerator: bool) -> None:
        self.model, self.groups, self.is_accelerator = model, groups_in(model), is_accelerator
        self.params = [param for group in self.groups for param in group.params]
        classes = sorted({type(p.local).__name__ for p in self.params if p.flat_position is None})
        check_value("parameters", classes, not classes, "that are not converted to a subclass yet")
        for group in self.groups:
            group.tree.agree()  # it compares numbers, which fake tensors do not have
        for channel in (channel for group in self.groups for channel in group.channels.values()):
            channel.all_gather = channel.reduce_scatter = Silent(is_widening=not is_accelerator)
        offloaded = [param for param in self.params if param.offload is not None]
        self.away = dict.fromkeys(offloaded if is_accelerator else ())
        self._live = LiveBytes()
        self.moments, self.used, self.on_cpu = list[Moment](), set[ShardedParam](), 0

    def record(self, batch: Any, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        """Run a step twice and record the second, which has an execution order."""
        given = batch() if callable(batch) else _torch.without_memory(batch)
        shards = [param.sharded for param in self.params]
        ours = set(map(id, shards))
        others = [*self.model.parameters(), *self.model.buffers(), *_torch.tensors_of(given)]

        def run() -> None:
            loss(_call(self.model, given), given).backward()
            optimizers.reduce_before_step(shards)

        live = self._live
        with live, contextlib.ExitStack() as stack:
            run()
            optimizers.free_after_step(shards)
            self.model.zero_grad()
            for group in self.groups:
                for bucket in group.buckets:
                    assert isinstance(bucket, FlatBucket)
                    live.count(bucket.locals, "")  # in `stored_in`
                    is_away = bucket.params[0] in self.away
                    live.count([bucket.sharded, stored_in(bucket)], "" if is_away else "shards")
                    self.on_cpu += bucket.sharded.nbytes if is_away else 0
            live.count([tensor for tensor in others if id(tensor) not in ours], "unsharded")
            stack.enter_context(listening(self.groups, self._hear))
            for param in self.params:
                if param.unsharded.requires_grad:
                    take = partial(self._take_gradient, param)
                    stack.enter_context(param.unsharded.register_post_accumulate_grad_hook(take))
            live.look()
            live.restart()  # after the programs are compiled for the listener
            run()
            self.moments.append(Moment("", None, live.peak, live.flops))
            self.at_end = live.now
            self.on_cpu += sum(grad.nbytes for grad in self._grads_away(self.params))
            self.model.zero_grad()

    def _take_gradient(self, param: ShardedParam, unsharded: torch.Tensor) -> None:
        assert unsharded.grad is not None
        self.used.add(param)
        self._live.count([unsharded.grad], "gradients")

    def _grads_away(self, params: Iterable[ShardedParam]) -> list[torch.Tensor]:
        grads = (param.sharded.grad for param in params if param in self.away)
        return [_torch.local_tensor(grad) for grad in grads if grad is not None]

    def _hear(self, event: str, group: ParamGroup) -> None:
        live = self._live
        live.look()
        live.count(self._grads_away(group.params), "")
        self.moments.append(Moment(event, group, live.peak, live.flops))
        live.restart()
