"""What a model will need on a number of devices, told without any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.arguments import check_function, check_type, checked_device
from composable_shard.insight.advice import is_repeated_block
from composable_shard.insight.group_traffic import StepTraffic, step_traffic, total_traffic
from composable_shard.insight.live_bytes import OptimizerFactory
from composable_shard.insight.optimizer_steps import OptimizerExplanation, explain_layouts
from composable_shard.insight.rehearsal import (
    Loss,
    Question,
    Ranks,
    Rehearsal,
    Shard,
    check_no_process_group,
    checked_ranks,
    default_loss,
    rehearse,
    rehearsing_arguments,
)
from composable_shard.insight.report import (
    Report,
    Section,
    Table,
    count_text,
    nbytes_text,
    seconds_text,
)
from composable_shard.insight.step_costs import (
    MemoryCurve,
    MemorySplit,
    Speeds,
    StepTime,
    time_of,
)
from composable_shard.optim.layouts import Fits, Layout
from composable_shard.train.wrap import Policy, apply_fully_shard

# The result of ``estimate``: plain values, and how they are shown ---------------------------------


@dataclass(frozen=True)
class Estimate(Report):
    """What one rank needs for a step.

    Attributes:
        mesh_shape: ``(replicas, shards)``.
        num_parameters: Elements of all parameters.
        num_groups: Groups that have parameters.
        peak: What a rank holds on its device at the fullest moment of a step.
        peak_at: Which moment that is.
        between_steps: What it holds between steps, gradients cleared.
        on_cpu: Bytes on the CPU, if parameters are offloaded.
        traffic: What a rank sends in a step, but for the optimizer.
        flops: Floating-point operations of a rank in forward and backward.
        time: How long that takes, if speeds were given.
        optimizer: What a step of the optimizer does, if layouts were given.
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
        """All of them."""
        return self.mesh_shape[0] * self.mesh_shape[1]

    def sections(self) -> list[Section]:
        """Return the tables of memory, communication and time."""
        replicas, shards = self.mesh_shape
        ranks = f"{shards} shards" + (f" x {replicas} replicas" if replicas > 1 else "")
        title = (
            f"{count_text(self.num_parameters)} parameters in {self.num_groups} "
            f"group{'s' * (self.num_groups != 1)} over {ranks}"
        )
        shown: list[Section] = [self._memory(title), self._communication()]
        shown += self._time()
        return shown if self.optimizer is None else [*shown, *self.optimizer.sections()]

    def _memory(self, title: str) -> Table:
        rows = [
            (
                field.name,
                nbytes_text(getattr(self.peak, field.name)),
                nbytes_text(getattr(self.between_steps, field.name)),
            )
            for field in fields(MemorySplit)
        ]
        rows.append(("in all", nbytes_text(self.peak.total), nbytes_text(self.between_steps.total)))
        if self.on_cpu:
            rows.append(("on the CPU", nbytes_text(self.on_cpu), nbytes_text(self.on_cpu)))
        columns = ("bytes of a rank", f"at the peak ({self.peak_at})", "between steps")
        return Table(title, columns, tuple(rows))

    def _communication(self) -> Table:
        rows = [
            (name, str(part.launches), str(part.messages), nbytes_text(part.nbytes))
            for name, part in (*self.traffic.parts.items(), ("in all", self.traffic.total))
        ]
        columns = ("a step", "launches", "messages", "bytes that a rank sends")
        return Table("Communication", columns, tuple(rows))

    def _time(self) -> list[Section]:
        rows = [("floating-point operations of a rank", count_text(self.flops))]
        if self.time is not None:
            for field in fields(StepTime):
                rows.append((field.name, seconds_text(getattr(self.time, field.name))))
        return [Table("Forward and backward", ("", "amount"), tuple(rows))]


# What a model will need on a number of devices, told without any of them --------------------------


def estimate(
    build_model: Callable[[], nn.Module],
    mesh_shape: int | tuple[int, ...],
    policy: Policy | None = None,
    batch: Any = None,
    *,
    shard: Shard | None = None,
    loss: Loss = default_loss,
    optimizer: OptimizerFactory | Mapping[Fits, Layout] | None = torch.optim.AdamW,
    device: str = "cuda",
    flops: float | None = None,
    bandwidth: float | None = None,
    replica_bandwidth: float | None = None,
    latency: float = 0.0,
    **kwargs: Any,
) -> Estimate:
    """Tell what a training step will need on each of 1 to 100,000 ranks, without any of them.

    The model is built, sharded and run with tensors that have no memory, on the smallest mesh on
    which a step takes the same course. What lives and what is computed there is watched. What is
    gathered, reduced and sent depends on the number of ranks, and is laid out for it by the
    arithmetic that the real step uses; so the time this takes does not grow with the ranks.

    Args:
        build_model: Makes the model, of which nothing is allocated.
        mesh_shape: The number of ranks, or ``(replicas, shards)``.
        policy: Which modules have a group of their own, as for :func:`apply_fully_shard`; those
            that are repeated in lists, if absent.
        batch: What one rank's forward takes: a tensor, a tuple of arguments, a dict of keyword
            arguments, or a function that makes one. Only shapes and dtypes count, so tensors on the
            meta device will do.
        shard: Applies ``fully_shard`` to the model by itself instead, on the mesh that it is given,
            of 1 or 2 ranks on each axis.
        loss: Makes a scalar of output and batch; if absent, the ``loss`` of the output if it has
            one, else the sum of its elements.
        optimizer: Makes the optimizer of some parameters; ``None`` leaves it out. Or the layouts
            of ``with_layout``: then it is told of the rank that has most matrices to step.
        device: ``"cpu"``, or that of an accelerator.
        flops: Floating-point operations that a device does in a second. With ``bandwidth``, the
            time of a step is estimated.
        bandwidth: Bytes that a rank sends in a second.
        replica_bandwidth: The same between replicas; ``bandwidth`` if absent.
        latency: Seconds that each launch of a collective takes besides.
        kwargs: Arguments of ``fully_shard``, such as ``mp_policy`` and ``reshard_after_forward``.

    Returns:
        An :class:`Estimate`: ``print`` it, ask it for ``to_dict()``, or let rich or a notebook
        show it.

    Raises:
        TypeError: If an argument has the wrong type, ``build_model`` returns no module, or ``loss``
            is missing.
        ValueError: If an argument is out of range, or the model is sharded in ways that cannot be
            laid out for other ranks: meshes of single parameters, tensor parallelism, subclasses.
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
    kind = checked_device("device", device).type
    ranks = checked_ranks(mesh_shape, kwargs.get("reshard_after_forward"))
    speeds = Speeds.of(flops, bandwidth, replica_bandwidth, latency)
    check_no_process_group()
    if batch is None:
        raise TypeError("Expected batch to be what one rank's forward takes, got None")
    if shard is not None and (policy is not None or kwargs):
        given = ["policy"] * (policy is not None) + list(kwargs)
        raise ValueError(
            f"Expected either shard or policy and arguments of fully_shard, got shard and {given}"
        )
    question = Question(
        build_model,
        shard or _by_policy(policy, rehearsing_arguments(ranks, kwargs)),
        batch,
        loss,
        optimizer,
        kind,
    )
    rehearsal = rehearse(question, ranks)
    result = _weigh(rehearsal, ranks)
    if speeds is None:
        return result
    return replace(result, time=time_of(rehearsal.moments, rehearsal.groups, speeds))


def _by_policy(policy: Policy | None, kwargs: dict[str, Any]) -> Shard:
    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        chosen = is_repeated_block(model) if policy is None else policy
        apply_fully_shard(model, chosen, mesh=mesh, **kwargs)

    return shard


def _weigh(rehearsal: Rehearsal, ranks: Ranks) -> Estimate:
    buckets = [bucket for group in rehearsal.groups for bucket in group.buckets]
    optimizer, away = rehearsal.optimizer, rehearsal.offloaded_optimizer
    between = MemorySplit(
        shards=sum(bucket.sharded_nbytes for bucket in buckets if not bucket.is_away),
        optimizer=optimizer.state,
        unsharded=rehearsal.unsharded,
    )
    curve = MemoryCurve(rehearsal.groups, between, rehearsal.moments)
    peak, (event, place) = curve.peak, curve.peak_at
    name = rehearsal.groups[place].name or "the root" if place >= 0 else ""
    peak_at = f"{event} of {name}" if name else "end of backward"
    stepping = replace(curve.end, optimizer=optimizer.state + optimizer.besides)
    if stepping.total > peak.total:
        peak, peak_at = stepping, "optimizer step"
    offloaded = sum(bucket.sharded_nbytes for bucket in buckets if bucket.is_away)
    return Estimate(
        mesh_shape=(ranks.num_replicas, ranks.num_shards),
        num_parameters=rehearsal.num_parameters,
        num_groups=sum(bool(mesh.gathers) for g in rehearsal.groups for mesh in g.meshes),
        peak=peak,
        peak_at=peak_at,
        between_steps=between,
        on_cpu=offloaded + away.state + away.besides + curve.elsewhere,
        traffic=total_traffic(map(step_traffic, rehearsal.groups)),
        flops=sum(moment.flops for moment in rehearsal.moments),
        time=None,
        optimizer=None if rehearsal.layouts is None else explain_layouts(rehearsal.layouts),
    )
