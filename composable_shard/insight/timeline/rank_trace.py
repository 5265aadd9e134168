"""What one rank recorded, and the file that holds it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from composable_shard.core.group import ParamGroup
from composable_shard.insight.timeline.recorder import join
from composable_shard.insight.timeline.spans import Flight, Mark, Sample, Span, unfold

FORMAT = "composable_shard.trace 1"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class GroupFacts(NamedTuple):
    """What is said of a group.

    Attributes:
        num_params: Its parameters.
        nbytes: Their bytes when they are gathered.
        shard_ranks: The ranks that share them, by their place in ``rank_sets``.
        replica_ranks: Those that hold the same shards as this one.
    """

    num_params: int
    nbytes: int
    shard_ranks: int
    replica_ranks: int


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded; all times are nanoseconds of its host's monotonic clock.

    Attributes:
        rank: Which rank.
        num_ranks: Of how many.
        host: The name of its host.
        clock: What its clock is the clock of: ranks for which this is equal share it.
        wall: Nanoseconds since 1970 when that clock showed ``begin``.
        device: Where it computes.
        memory_of: What ``memory`` counts: ``device``, ``heap``, ``resident`` or ``nothing``.
        begin: When recording began.
        end: When it ended.
        first_step: The number of the first step that was recorded.
        steps: When each step ended.
        rank_sets: Sets of ranks that communicate.
        groups: The groups of the model.
        spans: What it did, in order.
        flights: What was communicated.
        memory: Live memory.
    """

    rank: int
    num_ranks: int
    host: str
    clock: str
    wall: int
    device: str
    memory_of: str
    begin: int
    end: int
    first_step: int
    steps: list[int]
    rank_sets: list[list[int]]
    groups: dict[str, GroupFacts]
    spans: list[Span]
    flights: list[Flight]
    memory: list[Sample]

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """From when to when each step lasted; all of it is one if no step was marked."""
        ends = self.steps or [self.end]
        return list(zip([self.begin, *ends[:-1]], ends, strict=True))

    def shifted(self, by: int) -> RankTrace:
        """Return the same, ``by`` nanoseconds later."""
        return replace(
            self,
            begin=self.begin + by,
            end=self.end + by,
            steps=[step + by for step in self.steps],
            spans=[Span(s[0], s[1], s.start + by, s.end + by, *s[4:]) for s in self.spans],
            flights=[Flight(*f[:3], f.start + by, f.end + by) for f in self.flights],
            memory=[Sample(sample.time + by, sample.nbytes) for sample in self.memory],
        )

    def ranks_of(self, act: str, name: str) -> int:
        """Return the place in ``rank_sets`` of the ranks between which a collective is."""
        facts = self.groups[name]
        return facts.replica_ranks if act == "all-reduce" else facts.shard_ranks

    def to_json(self) -> str:
        """Return the text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> RankTrace:
        """Return what was written.

        Raises:
            ValueError: If it is not the file of a rank.
        """
        try:
            values = json.loads(text)
            found = values.pop("format") if isinstance(values, dict) else type(values).__name__
        except (ValueError, KeyError) as error:
            raise ValueError(f"Expected the trace of a rank in {source}, got {error!r}") from error
        if found != FORMAT:
            raise ValueError(f"Expected the format '{FORMAT}' in {source}, got {found!r}")
        values["groups"] = {name: GroupFacts(*facts) for name, facts in values["groups"].items()}
        for field, kind in (("spans", Span), ("flights", Flight), ("memory", Sample)):
            values[field] = [kind(*one) for one in values[field]]
        return cls(**values)


class Facts(NamedTuple):
    """What is known of a rank before it records.

    Attributes:
        rank: Which rank.
        num_ranks: Of how many.
        device: Where it computes.
        memory_of: What live memory counts.
        rank_sets: Sets of ranks that communicate.
        groups: The groups of the model.
    """

    rank: int
    num_ranks: int
    device: str
    memory_of: str
    rank_sets: list[list[int]]
    groups: dict[str, GroupFacts]

    @classmethod
    def gather(cls, roots: Mapping[str, ParamGroup], memory_of: str) -> Facts:
        """Collect them. Collective: none."""
        sets: dict[tuple[int, ...], int] = {}
        groups = {
            join(prefix, group.name): _facts_of(group, sets)
            for prefix, root in roots.items()
            for group in root.context.groups
        }
        is_alone = not dist.is_initialized()
        device = next(iter(roots.values())).mesh.device
        return cls(
            rank=0 if is_alone else dist.get_rank(),
            num_ranks=1 if is_alone else dist.get_world_size(),
            device=str(device),
            memory_of=memory_of,
            rank_sets=[list(ranks) for ranks in sets],
            groups=groups,
        )

    def trace(self, marks: Sequence[Mark], first_step: int) -> RankTrace:
        """Return what a rank recorded that has made these marks and made the last one just now."""
        unfolded = unfold(marks)
        # A tree that was sharded further meanwhile calls its groups otherwise: nothing is known.
        sets = [*self.rank_sets, [self.rank]]
        names = {flight.name for flight in unfolded.flights} - self.groups.keys()
        renamed = dict.fromkeys(sorted(names), GroupFacts(0, 0, len(sets) - 1, len(sets) - 1))
        behind = time.perf_counter_ns() - marks[0].time
        return RankTrace(
            rank=self.rank,
            num_ranks=self.num_ranks,
            device=self.device,
            memory_of=self.memory_of,
            rank_sets=sets if renamed else self.rank_sets,
            groups={**self.groups, **renamed},
            host=platform.node(),
            clock=_BOOT.read_text().strip() if _BOOT.exists() else platform.node(),
            wall=time.time_ns() - behind,
            begin=marks[0].time,
            end=max(mark.time for mark in marks),
            first_step=first_step,
            steps=unfolded.steps,
            spans=unfolded.spans,
            flights=unfolded.flights,
            memory=unfolded.memory,
        )


def _facts_of(group: ParamGroup, sets: dict[tuple[int, ...], int]) -> GroupFacts:
    nbytes = 0
    for param in group.params:
        nbytes += param.sharded.numel() * param.compute_dtype.itemsize
    mesh = group.params[0].mesh if group.params else group.mesh  # one that it communicates over
    shards, replicas = (
        (dist.get_rank() if dist.is_initialized() else 0,)
        if ranks is None
        else tuple(dist.get_process_group_ranks(ranks))
        for ranks in (mesh.shard_group, mesh.replica_group)
    )
    places = [sets.setdefault(ranks, len(sets)) for ranks in (shards, replicas)]
    return GroupFacts(len(group.params), nbytes, *places)


def file_of(folder: Path, rank: int) -> Path:
    """Return the file that a rank writes."""
    return folder / f"rank-{rank:05d}.json"


def write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whoever else writes it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    unfinished.write_text(text)
    unfinished.replace(path)
