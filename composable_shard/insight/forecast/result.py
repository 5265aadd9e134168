"""The result of ``estimate``: plain values, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, fields

from composable_shard.insight.forecast.clock import StepTime
from composable_shard.insight.forecast.memory import MemorySplit
from composable_shard.insight.groups.traffic import StepTraffic
from composable_shard.insight.report.amounts import count_text, nbytes_text, seconds_text
from composable_shard.insight.report.report import Report
from composable_shard.insight.report.sections import Section, Table


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
        traffic: What a rank sends in a step.
        flops: Floating-point operations of a rank in forward and backward.
        time: How long that takes, if speeds were given.
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
        return [*shown, *self._time()]

    def _memory(self, title: str) -> Table:
        names = [field.name for field in fields(MemorySplit)]
        rows = [
            (
                name,
                nbytes_text(getattr(self.peak, name)),
                nbytes_text(_of(self.between_steps, name)),
            )
            for name in names
        ]
        rows.append(("in all", nbytes_text(self.peak.total), nbytes_text(self.between_steps.total)))
        if self.on_cpu:
            rows.append(("on the CPU", nbytes_text(self.on_cpu), nbytes_text(self.on_cpu)))
        columns = ("bytes of a rank", f"at the peak ({self.peak_at})", "between steps")
        return Table(title, columns, tuple(rows))

    def _communication(self) -> Table:
        parts = {
            "forward gathers": self.traffic.forward_gathers,
            "backward gathers": self.traffic.backward_gathers,
            "reductions": self.traffic.reductions,
            "all-reduces": self.traffic.all_reduces,
            "in all": self.traffic.total,
        }
        rows = [
            (name, str(part.launches), str(part.messages), nbytes_text(part.nbytes))
            for name, part in parts.items()
        ]
        columns = ("a step", "launches", "messages", "bytes that a rank sends")
        return Table("Communication", columns, tuple(rows))

    def _time(self) -> list[Section]:
        rows = [("floating-point operations of a rank", count_text(self.flops))]
        if self.time is not None:
            for field in fields(StepTime):
                rows.append((field.name, seconds_text(getattr(self.time, field.name))))
        return [Table("Forward and backward", ("", "amount"), tuple(rows))]


def _of(split: MemorySplit, name: str) -> int:
    nbytes: int = getattr(split, name)
    return nbytes
