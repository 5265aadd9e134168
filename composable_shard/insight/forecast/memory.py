"""The most bytes a rank holds at once: a recorded step, with the sizes of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from composable_shard.insight.forecast.record import Moment
from composable_shard.insight.groups.plan import GroupPlan


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
