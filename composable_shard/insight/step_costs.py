"""What a recorded step costs on any number of ranks: the most bytes held at once, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from composable_shard.arguments import checked_number
from composable_shard.insight.group_plan import GroupPlan
from composable_shard.insight.group_traffic import StepTraffic, Traffic, step_traffic
from composable_shard.insight.live_bytes import Live
from composable_shard.insight.rehearsal import Moment

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


class GroupSizes(NamedTuple):
    """What a group occupies at its moments, in bytes.

    Attributes:
        gathered: Its unsharded parameters.
        staging: What a gather under way needs besides.
        kept: The part that is kept to regather from, if it is.
        given: Gradients that are sent from where autograd left them.
        made: What is made to send the others.
        result: What the reduction writes; 0 if nobody else has a part in the gradients.
        widened: Copies of that which are summed over the replicas instead.
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
    widened: int
    final: int
    final_elsewhere: int
    has_second_stage: bool

    @classmethod
    def of(cls, group: GroupPlan) -> GroupSizes:
        """Return what a group occupies."""
        every = [one for mesh in group.meshes for one in mesh.reductions]
        sent = [one for mesh in group.meshes if not mesh.is_alone for one in mesh.reductions]
        summed = [one for mesh in group.meshes for one in mesh.all_reductions]
        regathers = group.residence.in_backward == "regathered"
        gathered = sum(bucket.unsharded_nbytes for bucket in group.buckets)
        return cls(
            gathered=gathered,
            staging=sum(bucket.staging_nbytes for bucket in group.buckets),
            kept=gathered // group.residence.num_neighbours if regathers else 0,
            given=sum(one.given_nbytes for one in sent),
            made=sum(one.made_nbytes for one in sent),
            result=sum(one.result_nbytes for one in sent),
            widened=sum(one.all_reduced_nbytes for one in summed if one.is_widened),
            final=sum(one.final_nbytes for one in every if not one.is_away),
            final_elsewhere=sum(one.final_nbytes for one in every if one.is_away),
            has_second_stage=any(mesh.num_replicas > 1 for mesh in group.meshes),
        )


class MemoryCurve:
    """Goes through the moments of a step and remembers the fullest.

    Args:
        groups: The plans of all groups.
        lasting: What is held all the time.
        moments: The step.

    Attributes:
        peak: What was held at the fullest moment.
        peak_at: The event and the group that were next then.
        end: What is held when the step ends.
        elsewhere: Bytes of reduced gradients on the CPU.
    """

    def __init__(
        self, groups: Sequence[GroupPlan], lasting: MemorySplit, moments: Sequence[Moment]
    ) -> None:
        self.peak = self.end = lasting
        self.peak_at = ("", -1)
        self.elsewhere = 0
        self._lasting = lasting
        self._sizes = [GroupSizes.of(group) for group in groups]
        self._parameters: dict[tuple[str, int], int] = {}  # by what it is, and of which group
        self._gradients: dict[int, int] = {}  # by group
        self._reached: set[int] = set()  # by backward
        for moment in moments:
            self._look(moment)
            if moment.group >= 0:
                self._happen(moment, self._sizes[moment.group])
        self.end = self._held(Live())

    def _held(self, live: Live) -> MemorySplit:
        return replace(
            self._lasting,
            gathered=sum(self._parameters.values()),
            gradients=live.gradients + sum(self._gradients.values()),
            activations=live.activations,
        )

    def _look(self, moment: Moment) -> None:
        held = self._held(moment.peak)
        if held.total > self.peak.total:
            self.peak, self.peak_at = held, (moment.event, moment.group)

    def _happen(self, moment: Moment, sizes: GroupSizes) -> None:
        group = moment.group
        match moment.event:
            case "all_gather":
                self._parameters["gathered", group] = sizes.gathered
                self._parameters["staging", group] = sizes.staging
            case "wait_for_all_gather":
                self._free(group, "staging", "kept")
            case "pre_backward":
                self._reached.add(group)
            case "reshard":
                if sizes.kept and group not in self._reached:
                    self._parameters["kept", group] = sizes.kept
                    self._look(moment)
                self._free(group, "gathered", "staging")
            case "reduce_scatter" if sizes.result:
                # Gradients are packed while all are there; then those that were copied are freed.
                self._gradients[group] = sizes.made + sizes.result
                self._look(moment)
                self._gradients[group] = sizes.given + sizes.made + sizes.result
            case "wait_for_reduce_scatter" if sizes.has_second_stage:
                self._gradients[group] = sizes.result + sizes.widened
            case "reduce_scatter" | "wait_for_reduce_scatter" | "wait_for_all_reduce":
                self._deliver(moment, sizes)

    def _free(self, group: int, *kinds: str) -> None:
        for kind in kinds:
            self._parameters.pop((kind, group), None)

    def _deliver(self, moment: Moment, sizes: GroupSizes) -> None:
        if sizes.result and sizes.final != sizes.result:  # both are there while it is cast
            self._gradients[moment.group] = sizes.final + sizes.result
            self._look(moment)
        self._gradients[moment.group] = sizes.final
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

    @classmethod
    def of(
        cls,
        flops: float | None,
        bandwidth: float | None,
        replica_bandwidth: float | None,
        latency: float,
    ) -> Speeds | None:
        """Return the speeds, ``None`` if none are given.

        Raises:
            TypeError: If one is no number.
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
        speeds = cls(
            checked_number("flops", flops),
            checked_number("bandwidth", bandwidth),
            checked_number("replica_bandwidth", other),
            checked_number("latency", latency),
        )
        is_fast = all(s > 0 for s in (speeds.flops, speeds.bandwidth, speeds.replica_bandwidth))
        if not (is_fast and speeds.latency >= 0):  # a speed that is NaN is none
            raise ValueError(
                "Expected positive speeds and a latency of at least 0, got "
                f"flops={flops!r}, bandwidth={bandwidth!r}, replica_bandwidth={other!r}, "
                f"latency={latency!r}"
            )
        return speeds


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
