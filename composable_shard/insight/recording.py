"""The recording of one rank: marks of its groups and optimizers, times, bytes, and their file.

At every moment a rank does one thing, so spans neither overlap nor nest: a wait in the forward of a
module splits the forward into two spans. A flight is a collective, from the begin of its launch
until its result has been waited for. Flights overlap with spans.

A device works asynchronously to the host. Its clock records events among the kernels, and reads
their times at the end, so that recording waits for nothing.

On an accelerator the caching allocator reports the live memory and the memory that it has reserved.
The difference is cached, or lost to fragmentation. On the CPU nothing counts tensors, but the C
library reports how much of its heap is in use, which falls when a tensor is freed.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.group import ParamGroup

# PURE: from the marks of one rank to spans --------------------------------------------------------

COMPUTE = ("forward", "backward", "optimizer")
KINDS = (*COMPUTE, "launch", "copy", "wait")
"""Kinds of spans: compute, the launch of a collective, the copy of its result to its place, and
waits, in which nothing is computed: exposed communication."""

OPS = {
    "all_gather": "gather",
    "regather": "regather",  # from parts that neighbours kept
    "reduce_scatter": "reduce",
    "all_reduce": "all-reduce",
}
"""Collectives by the events that name them."""

_PART = re.compile(rf"(begin_wait_for_|waited_for_|wait_for_|begin_|)({'|'.join(OPS)}|copies)")
_PART_BEGINS = {"begin_": "launch", "begin_wait_for_": "wait", "waited_for_": "copy"}

Bytes = tuple[int, int | None]
"""Live bytes, and bytes that the caching allocator of a device has reserved."""


class Mark(NamedTuple):
    """An event.

    Attributes:
        time: Nanoseconds.
        event: One of ``insight.events``, or ``begin``, ``begin_optimizer``, ``optimizer``,
            ``step``, ``end``.
        name: The group, or the class of the optimizer.
        memory: The memory at this moment, if it was read.
    """

    time: int
    event: str
    name: str = ""
    memory: Bytes | None = None


class Span(NamedTuple):
    """The work of a rank, or a collective in flight, from ``start`` to ``end``.

    Attributes:
        kind: One of ``KINDS``; of a flight its op.
        name: The group, or the class of the optimizer.
        start: Nanoseconds.
        end: Nanoseconds.
        op: The collective that is launched, waited for or copied, one of the values of ``OPS``;
            ``copies`` where a rank waits for all copies between host and device.
        number: The number of earlier flights of this op and group; -1 for work without a flight.
        late: Nanoseconds of a wait before the last rank launched the collective.
        late_rank: That rank; -1 if none was late.
    """

    kind: str
    name: str
    start: int = 0
    end: int = 0
    op: str = ""
    number: int = -1
    late: int = 0
    late_rank: int = -1


class Sample(NamedTuple):
    """The memory at one moment.

    Attributes:
        time: Nanoseconds.
        nbytes: Live bytes.
        reserved: Bytes that the caching allocator has taken from the device; ``None`` on the CPU.
    """

    time: int
    nbytes: int
    reserved: int | None = None


class Unfolded:
    """The spans and flights of a rank, read off its marks.

    Args:
        marks: In the order in which they were made.

    Attributes:
        spans: The work of the rank, in order.
        flights: Collectives, by their ends.
        steps: The end of each step.
        memory: Live and reserved memory.

    Example:
        >>> marks = [Mark(0, "pre_forward", "0"), Mark(5, "begin_wait_for_all_gather", "0")]
        >>> marks += [Mark(7, "waited_for_all_gather", "0"), Mark(7, "wait_for_all_gather", "0")]
        >>> marks += [Mark(9, "post_forward", "0")]
        >>> [(span.kind, span.start, span.end) for span in Unfolded(marks).spans]
        [('forward', 0, 5), ('wait', 5, 7), ('forward', 7, 9)]
    """

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.spans, self.flights = list[Span](), list[Span]()
        self.steps, self.memory = list[int](), list[Sample]()
        self._wholes: list[Span] = []  # forwards, backwards and optimizer steps in progress
        self._part: Span | None = None  # a launch, wait or copy within them
        self._since = self._now = 0
        self._gathers: dict[str, str] = {}  # how each group was gathered last
        self._launched: dict[tuple[str, str], int] = {}  # when the launch in flight began
        self._waited: dict[tuple[str, str], int] = {}
        self._num_flown: Counter[tuple[str, str]] = Counter()
        for mark in marks:
            self._read(mark)

    def _read(self, mark: Mark) -> None:
        """Read the next mark; a time before that of the last mark counts as that moment."""
        self._now = max(self._now, mark.time)
        before = self._doing
        if mark.memory is not None:
            self.memory.append(Sample(self._now, *mark.memory))
        part = _PART.fullmatch(mark.event)
        if part is None:
            self._read_whole(mark.event, mark.name)
        else:
            moment, stage = part.groups()
            self._read_part(moment, stage, mark.name)
        if self._doing != before:
            if before is not None and self._now > self._since:
                self.spans.append(before._replace(start=self._since, end=self._now))
            self._since = self._now

    @property
    def _doing(self) -> Span | None:
        return self._part or (self._wholes[-1] if self._wholes else None)

    def _read_part(self, moment: str, stage: str, name: str) -> None:
        """Read a mark of a launch, a wait or a copy."""
        if moment == "begin_" and stage.endswith("gather"):
            self._gathers[name] = stage
        if stage == "all_gather":
            stage = self._gathers.get(name, stage)
        key = op, _ = OPS.get(stage, stage), name
        number = self._num_flown[key] if stage in OPS else -1
        kind = _PART_BEGINS.get(moment)
        self._part = None if kind is None else Span(kind, name, op=op, number=number)
        if moment == "begin_":
            self._launched[key] = self._now
        elif moment == "waited_for_":
            self._waited[key] = self._now
            self._land(key)
        elif not moment:  # an all-reduce begins when the reduction over the shards has ended
            self._launched.setdefault(key, self._waited.get(("reduce", name), self._now))

    def _land(self, key: tuple[str, str]) -> None:
        start = self._launched.pop(key, None)
        if start is not None:
            op, name = key
            self.flights.append(Span(op, name, start, self._now, op, self._num_flown[key]))
            self._num_flown[key] += 1

    def _read_whole(self, event: str, name: str) -> None:
        """Read a mark of a forward, a backward, an optimizer, a step or a free."""
        if event == "reshard":  # the gather ends here if nothing waited for it
            self._land((OPS[self._gathers.get(name, "all_gather")], name))
        if event in ("reshard", "accumulate", "begin"):
            return
        self._part = None  # a part that failed has no end
        kind, wholes = event.rpartition("_")[2], self._wholes
        doing = Span(kind, name)
        if event in ("step", "end"):
            wholes.clear()
            if event == "step":
                self.steps.append(self._now)
        elif event.startswith("post_") or event == "optimizer":
            if doing in wholes:  # a forward ends everything that was left open in it
                place = len(wholes) - 1 - wholes[::-1].index(doing)
                del wholes[place : None if kind == "forward" else place + 1]
        elif kind != "backward" or doing not in wholes:
            if kind == "forward" and all(whole.kind != "forward" for whole in wholes):
                wholes.clear()  # left by a backward or an optimizer that failed
            wholes.append(doing)


# When something happens on a rank: on the host, or in the order of the device's work --------------


class Clock:
    """The monotonic clock of the host, which all its processes share.

    A stamp is taken quickly during training. Times are computed from stamps afterwards.
    """

    def stamp(self) -> Any:
        """Return a stamp of this moment."""
        return time.perf_counter_ns()

    def times(self, stamps: Sequence[Any]) -> list[int]:
        """Return the times of stamps, in nanoseconds of the host's clock."""
        return list(stamps)


class DeviceClock(Clock):
    """Events between the kernels of an accelerator.

    Its creation waits for the device once, to set it by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self.stamp()
        self._base.synchronize()
        self._base_time = time.perf_counter_ns()

    def stamp(self) -> Any:
        """Record an event after the work that the current stream has so far."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def times(self, stamps: Sequence[Any]) -> list[int]:
        """Wait for the device and return when it passed each event."""
        torch.accelerator.synchronize(self._device)
        passed = (self._base.elapsed_time(stamp) for stamp in stamps)
        return [self._base_time + round(milliseconds * 1_000_000) for milliseconds in passed]


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which work on ``device`` is timed."""
    return Clock() if device.type == "cpu" else DeviceClock(device)


# How many bytes are live on a rank ----------------------------------------------------------------


class LiveMemory(NamedTuple):
    """The source of live memory.

    Attributes:
        read: Returns the bytes; ``None`` where nothing reports them.
        of: The memory that is counted: ``device``, ``heap`` or ``nothing``.
    """

    read: Callable[[], Bytes] | None
    of: str


def live_memory(device: torch.device) -> LiveMemory:
    """Return the source of live memory of a rank that computes on ``device``."""
    if device.type != "cpu":
        return LiveMemory(partial(_torch.memory_in_use, device), "device")
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # the C library is not glibc
        return LiveMemory(None, "nothing")
    mallinfo.restype = _MallInfo

    def read() -> Bytes:
        counts = mallinfo().counts
        return counts[4] + counts[7], None  # hblkhd and uordblks: mapped, and in use of the heap

    return LiveMemory(read, "heap")


class _MallInfo(ctypes.Structure):
    _fields_ = [("counts", ctypes.c_size_t * 10)]


# The recording of one rank, and its file ----------------------------------------------------------


def join(prefix: str, name: str) -> str:
    """Return the name within the model of a group that is called ``name`` within its tree."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


FORMAT = "composable_shard.trace 2"
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Collective = tuple[int, str, str, int]
"""The first of the ranks that take part, the op, the group and the number of its flight: the same
on all ranks that take part."""


class GroupFacts(NamedTuple):
    """Facts about a group.

    Attributes:
        nbytes: Bytes of its parameters when they are gathered.
        first_of_shards: The first of the ranks that share them.
        first_of_replicas: The first of the ranks that hold the same shards as this one.
    """

    nbytes: int
    first_of_shards: int
    first_of_replicas: int


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank; all times are nanoseconds of its host's monotonic clock.

    Attributes:
        rank: The rank.
        num_ranks: The number of ranks of the job.
        clock: Identifies the clock: ranks with the same value share one.
        device: The device of compute.
        memory_of: The memory that is counted: ``device``, ``heap`` or ``nothing``.
        groups: The groups of the model.
        wall: Nanoseconds since 1970 when that clock showed ``begin``.
        begin: The begin of the recording.
        end: Its end.
        first_step: The number of the first recorded step.
        steps: The end of each step.
        spans: The work of the rank, in order.
        flights: Its collectives.
        memory: Live and reserved memory.
    """

    rank: int
    num_ranks: int
    clock: str
    device: str
    memory_of: str
    groups: dict[str, GroupFacts]
    wall: int = 0
    begin: int = 0
    end: int = 0
    first_step: int = 0
    steps: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[Span] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)

    @classmethod
    def empty(cls, roots: Mapping[str, ParamGroup], memory_of: str) -> RankTrace:
        """Return the facts about a rank, before it records. Collective: none."""
        groups = {
            join(prefix, group.name): _facts_of(group)
            for prefix, root in roots.items()
            for group in root.tree.groups
        }
        return cls(
            rank=_rank_here(),
            num_ranks=dist.get_world_size() if dist.is_initialized() else 1,
            clock=_BOOT.read_text().strip() if _BOOT.exists() else platform.node(),
            device=str(next(iter(roots.values())).mesh.device),
            memory_of=memory_of,
            groups=groups,
        )

    def recorded(self, marks: Sequence[Mark], first_step: int) -> RankTrace:
        """Return the trace of a rank that has made these marks, the last one just now."""
        unfolded = Unfolded(marks)
        behind = time.perf_counter_ns() - marks[0].time
        return replace(
            self,
            wall=time.time_ns() - behind,
            begin=marks[0].time,
            end=max(mark.time for mark in marks),
            first_step=first_step,
            steps=unfolded.steps,
            spans=unfolded.spans,
            flights=unfolded.flights,
            memory=unfolded.memory,
        )

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """Begin and end of each step; the whole recording is one if no step was marked."""
        ends = self.steps or [self.end]
        return list(zip([self.begin, *ends[:-1]], ends, strict=True))

    def shifted(self, by: int) -> RankTrace:
        """Return the same, ``by`` nanoseconds later."""

        def later(spans: list[Span]) -> list[Span]:
            return [span._replace(start=span.start + by, end=span.end + by) for span in spans]

        return replace(
            self,
            begin=self.begin + by,
            end=self.end + by,
            steps=[step + by for step in self.steps],
            spans=later(self.spans),
            flights=later(self.flights),
            memory=[sample._replace(time=sample.time + by) for sample in self.memory],
        )

    def facts_of(self, name: str) -> GroupFacts:
        """Return the facts about a group.

        Nothing is known of a group that had another name when the recording began, because its tree
        has been sharded further since.
        """
        return self.groups.get(name, GroupFacts(0, self.rank, self.rank))

    def collective_of(self, of: Span) -> Collective:
        """Return the collective that a flight, or the wait for it, belongs to."""
        _, shards, replicas = self.facts_of(of.name)
        return replicas if of.op == "all-reduce" else shards, of.op, of.name, of.number

    def to_json(self) -> str:
        """Return the text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> RankTrace:
        """Return the recording that :meth:`to_json` wrote.

        Raises:
            ValueError: If the text is not the file of a rank.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                expected = f"Expected the format '{FORMAT}'"
                raise ValueError(expected)
            groups = values["groups"].items()
            values["groups"] = {name: GroupFacts(*facts) for name, facts in groups}
            for field, kind in (("spans", Span), ("flights", Span), ("memory", Sample)):
                values[field] = [kind(*fields) for fields in values[field]]
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Expected the trace of a rank in {source}, got {error!r}") from error


def _rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _facts_of(group: ParamGroup) -> GroupFacts:
    nbytes = sum(p.sharded.numel() * p.compute_dtype.itemsize for p in group.params)
    mesh = group.params[0].mesh if group.params else group.mesh  # of several, the first one
    firsts = (
        _rank_here() if ranks is None else dist.get_process_group_ranks(ranks)[0]
        for ranks in (mesh.shard_group, mesh.replica_group)
    )
    return GroupFacts(nbytes, *firsts)


def file_of(folder: Path, rank: int) -> Path:
    """Return the file that a rank writes."""
    return folder / f"rank-{rank:05d}.json"


def write(path: Path, text: str) -> None:
    """Write a file so that it exists whole or not at all, even if others write it too."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    unfinished.write_text(text)
    unfinished.replace(path)
