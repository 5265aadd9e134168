"""How long a step takes, if compute and communication each run at one speed beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composable_shard.insight.forecast.record import Moment
from composable_shard.insight.groups.plan import GroupPlan
from composable_shard.insight.groups.traffic import StepTraffic, Traffic, step_traffic


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
