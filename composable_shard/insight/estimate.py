"""``estimate``: memory, communication and time of a step on devices that need not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import _torch
from composable_shard.arguments import check_function, check_type, checked_device, checked_number
from composable_shard.core.group import ParamGroup
from composable_shard.errors import ShardError
from composable_shard.insight.explain import (
    OptimizerExplanation,
    explain_layouts,
    is_repeated_block,
)
from composable_shard.insight.group_steps import StepTraffic, sharded_nbytes, traffic_of
from composable_shard.insight.rehearsal import (
    Moment,
    OptimizerBytes,
    OptimizerFactory,
    Rehearsal,
    optimizer_bytes,
    plan_layouts,
    rehearsed,
)
from composable_shard.insight.report import (
    Report,
    Section,
    Table,
    count_text,
    counted,
    nbytes_text,
    seconds_text,
)
from composable_shard.optim.layouts import Fits, Layout
from composable_shard.train.wrap import Policy, apply_fully_shard

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
        optimizer: A step of the optimizer, if layouts were given.
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
    optimizer: OptimizerExplanation | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.mesh_shape[0] * self.mesh_shape[1]

    def sections(self) -> list[Section]:
        """Return the tables of memory, communication and time."""
        optimizer = [] if self.optimizer is None else self.optimizer.sections()
        return [self._memory(), self._communication(), self._time(), *optimizer]

    def _memory(self) -> Table:
        replicas, shards = self.mesh_shape
        ranks = f"{shards} shards" + (f" x {replicas} replicas" if replicas > 1 else "")
        title = (
            f"{count_text(self.num_parameters)} parameters in "
            f"{counted(self.num_groups, 'group')} over {ranks}"
        )
        peak, between = vars(self.peak), vars(self.between_steps)
        amounts = [(name, peak[name], between[name]) for name in peak]
        amounts.append(("total", self.peak.total, self.between_steps.total))
        if self.on_cpu:
            amounts.append(("on the CPU", self.on_cpu, self.on_cpu))
        rows = [(name, *map(nbytes_text, both)) for name, *both in amounts]
        headings = ("bytes of a rank", f"at the peak ({self.peak_at})", "between steps")
        return Table(title, headings, rows)

    def _communication(self) -> Table:
        parts = {**self.traffic.parts, "total": self.traffic.total}
        rows = [(n, p.launches, p.messages, nbytes_text(p.nbytes)) for n, p in parts.items()]
        headings = ("a step", "launches", "messages", "bytes that a rank sends")
        return Table("Communication", headings, rows)

    def _time(self) -> Table:
        times = {} if self.time is None else vars(self.time)
        rows = [("floating-point operations of a rank", count_text(self.flops))]
        rows += [(name, seconds_text(seconds)) for name, seconds in times.items()]
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
        raise TypeError(
            "Expected forward to return a tensor, or an output with a loss, got "
            f"{type(output).__name__}; pass loss=, a function of the output and the batch"
        )
    return output.sum()


def estimate(
    build_model: Callable[[], nn.Module],
    mesh_shape: int | tuple[int, ...],
    policy: Policy | None = None,
    batch: Any = None,
    *,
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] = default_loss,
    optimizer: OptimizerFactory | Mapping[Fits, Layout] | None = torch.optim.AdamW,
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
        optimizer: Makes the optimizer of some parameters; ``None`` leaves it out. Or the layouts
            of ``with_layout``: the estimate is then that of the rank with the most matrices to
            step.
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
    makes = optimizer is None or callable(optimizer) or isinstance(optimizer, Mapping)
    check_type("optimizer", optimizer, makes, "a function of parameters, a mapping or None")
    device_type = checked_device("device", device).type
    shape = _checked_shape(mesh_shape)
    speeds = _checked_speeds(
        flops=flops, bandwidth=bandwidth, replica_bandwidth=replica_bandwidth, latency=latency
    )
    if dist.is_initialized():
        raise ShardError(
            "Expected estimate in a process without a process group, got one of backend "
            f"'{dist.get_backend()}'; call it before init_process_group, or in a process of its own"
        )
    if batch is None:
        raise TypeError("Expected batch to be the inputs of one rank's forward, got None")
    if shard is not None and (policy is not None or kwargs):
        given = ["policy"] * (policy is not None) + list(kwargs)
        raise ValueError(
            f"Expected either shard or policy and arguments of fully_shard, got shard and {given}"
        )

    def shard_by_policy(model: nn.Module, mesh: DeviceMesh) -> None:
        chosen = is_repeated_block(model) if policy is None else policy
        apply_fully_shard(model, chosen, mesh=mesh, **kwargs)

    shards = shard or shard_by_policy
    try:
        with rehearsed(build_model, shards, batch, loss, shape, device_type) as rehearsal:
            return _weigh(rehearsal, shape, optimizer, speeds, is_accelerator=device_type != "cpu")
    except _torch.ReadsValues as error:
        error.add_note(
            "estimate runs the model on tensors without values, but the model or the loss "
            "reads a value"
        )
        raise


def _checked_shape(mesh_shape: object) -> tuple[int, ...]:
    shape: Any = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    is_shape = isinstance(shape, (tuple, list)) and len(shape) in (1, 2)
    if not is_shape or not all(isinstance(n, int) and n is not True and n > 0 for n in shape):
        raise ValueError(
            f"Expected mesh_shape to be a number of ranks or (replicas, shards), got {mesh_shape!r}"
        )
    return tuple(shape)


def _weigh(
    rehearsal: Rehearsal,
    shape: tuple[int, ...],
    optimizer: OptimizerFactory | Mapping[Fits, Layout] | None,
    speeds: dict[str, float] | None,
    *,
    is_accelerator: bool,
) -> Estimate:
    buckets = [bucket for group in rehearsal.groups for bucket in group.buckets]
    params = [param for bucket in buckets for param in bucket.params]
    away = {param for param in params if is_accelerator and param.offload is not None}
    offloaded_shards = sum(sharded_nbytes(bucket) for bucket in buckets if bucket.params[0] in away)
    layouts, offloaded = None, OptimizerBytes()
    if isinstance(optimizer, Mapping):
        for param in params:
            if param in away:
                raise ValueError(
                    "Expected parameters on the device for an estimate of layouts, got "
                    f"'{param.name}', which is offloaded; leave out the offload_policy, or pass a "
                    "function that makes an optimizer from parameters"
                )
        layouts, kept = plan_layouts(rehearsal.model, optimizer, at_once=is_accelerator)
    elif optimizer is not None:
        used = [param for param in params if param in rehearsal.used]
        here = [param.local for param in used if param not in away]
        kept = optimizer_bytes(optimizer, here, at_once=is_accelerator)
        there = [param.local for param in used if param in away]
        offloaded = optimizer_bytes(optimizer, there, at_once=False)
    else:
        kept = OptimizerBytes()
    between = MemorySplit(
        shards=sum(map(sharded_nbytes, buckets)) - offloaded_shards,
        optimizer=kept.state,
        unsharded=sum(tensor.numel() * tensor.itemsize for tensor in rehearsal.lasting),
    )
    fullest = max(rehearsal.moments, key=lambda moment: sum(moment.peak))
    peak, peak_at = replace(between, **fullest.peak._asdict()), "end of backward"
    if fullest.group is not None:
        peak_at = f"{fullest.event} of {fullest.group.name or 'the root'}"
    at_end = rehearsal.at_end._asdict()
    stepping = replace(between, **at_end, optimizer=kept.state + kept.besides)
    if stepping.total > peak.total:
        peak, peak_at = stepping, "optimizer step"
    groups = rehearsal.groups
    traffics = {group: traffic_of(group) for group in groups}
    on_cpu = sum(rehearsal.offloaded.values(), offloaded_shards)
    return Estimate(
        mesh_shape=shape if len(shape) == 2 else (1, shape[0]),
        num_parameters=sum(param.numel() for param in rehearsal.model.parameters()),
        num_groups=sum(len({bucket.mesh for bucket in group.buckets}) for group in groups),
        peak=peak,
        peak_at=peak_at,
        between_steps=between,
        on_cpu=on_cpu + offloaded.state + offloaded.besides,
        traffic=sum(traffics.values(), StepTraffic()),
        flops=sum(moment.flops for moment in rehearsal.moments),
        time=None if speeds is None else _time_of(rehearsal.moments, traffics, **speeds),
        optimizer=None if layouts is None else explain_layouts(layouts),
    )


# The time of a step with compute and communication in parallel ------------------------------------


def _checked_speeds(**given: float | None) -> dict[str, float] | None:
    """Return the arguments of :func:`_time_of` that are speeds; ``None`` if none are given.

    Raises:
        TypeError: If a speed is no number.
        ValueError: If only some speeds are given, or a speed is not positive.
    """
    numbers = {n: checked_number(n, value) for n, value in given.items() if value is not None}
    if not all(number > 0 or (name, number) == ("latency", 0) for name, number in numbers.items()):
        raise ValueError(
            "Expected positive speeds and a latency of at least 0, got "
            + ", ".join(f"{name}={number!r}" for name, number in numbers.items())
        )
    flops, bandwidth = given["flops"], given["bandwidth"]
    if (flops is None) != (bandwidth is None):
        raise ValueError(
            "Expected both flops and bandwidth, or neither, got "
            f"flops={flops!r} and bandwidth={bandwidth!r}"
        )
    return None if flops is None else {"replica_bandwidth": numbers["bandwidth"], **numbers}


def _time_of(
    moments: Iterable[Moment],
    traffics: Mapping[ParamGroup, StepTraffic],
    *,
    flops: float,
    bandwidth: float,
    replica_bandwidth: float,
    latency: float,
) -> StepTime:
    """Replay a recorded step: one lane computes, one communicates, each in order.

    Args:
        moments: The step.
        traffics: The traffic of each group.
        flops: Floating-point operations of a device per second.
        bandwidth: Bytes per second that a rank sends to ranks that share its parameters.
        replica_bandwidth: The same to ranks that hold the same shards.
        latency: Additional seconds per launch.
    """
    compute = clock = lane = communication = 0.0
    done: dict[tuple[ParamGroup | None, str], float] = {}
    is_backward = False
    for event, group, _, operations in moments:
        compute, clock = compute + operations / flops, clock + operations / flops
        is_backward = is_backward or event == "pre_backward"
        if group is not None and event in ("all_gather", "reduce_scatter", "all_reduce"):
            traffic, rate = traffics[group], bandwidth
            sent = traffic.backward_gathers if is_backward else traffic.forward_gathers
            if event == "reduce_scatter":
                sent = traffic.reductions
            elif event == "all_reduce":
                sent, rate = traffic.all_reduces, replica_bandwidth
            seconds = sent.launches * latency + (sent.nbytes or 0) / rate
            communication += seconds
            lane = done[group, event] = max(lane, clock) + seconds
        elif event.startswith("wait_for_"):
            clock = max(clock, done.pop((group, event.removeprefix("wait_for_")), 0.0))
    return StepTime(compute, communication, clock - compute, clock)
