"""What one rank records: marks of its groups and optimizers, times, bytes, and the file of them.

At every moment a rank does one thing, so spans neither overlap nor nest: where a wait falls into
the forward of a module, the forward is two spans with the wait between them. What is communicated
meanwhile are flights, from the launch of a collective until it has been waited for.

A device works behind the host that tells it what to do. What counts there is when the work is
done, so an event is recorded among it, which costs no waiting; the times of all events are read at
the end.

On an accelerator the caching allocator knows the live memory, and also what it has reserved: the
rest is cached, or lost to fragmentation. On the CPU nothing counts tensors, but the C library knows
what its heap has handed out, which falls when a tensor is freed.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from composable_shard.core.group import ParamGroup

# PURE: from the marks of one rank to spans --------------------------------------------------------

COMPUTE = ("forward", "backward", "optimizer")
KINDS = (*COMPUTE, "launch", "copy", "wait")
"""What a rank may be doing: computing, launching a collective, copying what one has brought to its
place, or waiting, in which time nothing is computed: communication that is exposed."""

ACTS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}
"""What is communicated, by the events that say so; ``regather`` if it is gathered from parts that
neighbours kept."""


class Reading(NamedTuple):
    """The memory of a rank at one moment.

    Attributes:
        nbytes: Bytes that are live.
        reserved: Bytes that the caching allocator has taken from the device; ``None`` where there
            is none.
    """

    nbytes: int
    reserved: int | None = None


class Mark(NamedTuple):
    """One event, when it was heard, and how much memory there was, if that was asked.

    Attributes:
        time: Nanoseconds.
        event: One of ``insight.events``, or ``begin``, ``begin_optimizer``, ``optimizer``,
            ``step``, ``end``.
        name: The group, or the class of the optimizer.
        memory: What was read.
    """

    time: int
    event: str
    name: str = ""
    memory: Reading | None = None


class Span(NamedTuple):
    """One thing that a rank did from ``start`` to ``end``.

    Attributes:
        kind: One of ``KINDS``.
        name: The group, or the class of the optimizer.
        start: Nanoseconds.
        end: Nanoseconds.
        op: What was launched, waited for or copied; ``copies`` where a rank waits for all
            between host and device.
        number: Which flight of this op and group it belongs to; -1 if to none.
        late: Nanoseconds of a wait before the last rank launched what is waited for.
        late_rank: Which rank that was; -1 if none was late.
    """

    kind: str
    name: str
    start: int
    end: int
    op: str = ""
    number: int = -1
    late: int = 0
    late_rank: int = -1


class Flight(NamedTuple):
    """One collective, from the beginning of its launch until its end was waited for.

    Attributes:
        op: What is communicated.
        name: The group.
        number: How many of this op and group came before.
        start: Nanoseconds; when its launch began.
        end: Nanoseconds.
    """

    op: str
    name: str
    number: int
    start: int
    end: int


class Sample(NamedTuple):
    """Live and reserved memory at one moment; see :class:`Reading`."""

    time: int
    nbytes: int
    reserved: int | None = None


class _Doing(NamedTuple):
    kind: str
    name: str
    op: str = ""
    number: int = -1


class Unfolded:
    """What the marks of a rank say.

    Args:
        marks: In the order in which they were made.

    Attributes:
        spans: What it did, in order.
        flights: What was communicated, by when it ended.
        steps: When each step ended.
        memory: Live and reserved memory, where it was asked.

    Example:
        >>> marks = [Mark(0, "pre_forward", "0"), Mark(5, "begin_wait_for_all_gather", "0")]
        >>> marks += [Mark(7, "waited_for_all_gather", "0"), Mark(7, "wait_for_all_gather", "0")]
        >>> marks += [Mark(9, "post_forward", "0")]
        >>> [(span.kind, span.start, span.end) for span in Unfolded(marks).spans]
        [('forward', 0, 5), ('wait', 5, 7), ('forward', 7, 9)]
    """

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.spans, self.flights = list[Span](), list[Flight]()
        self.steps, self.memory = list[int](), list[Sample]()
        self._under_way: list[_Doing] = []  # forwards, backwards and optimizer steps
        self._part: _Doing | None = None  # a launch, wait or copy within them
        self._since = self._now = 0
        self._flying: dict[tuple[str, str], int] = {}  # when the launch began
        self._waited: dict[tuple[str, str], int] = {}
        self._regathering: set[str] = set()
        self._num_flown: Counter[tuple[str, str]] = Counter()
        for mark in marks:
            self._read(mark)

    def _read(self, mark: Mark) -> None:
        """Take in the next mark; one that seems to come before the last counts as that moment."""
        self._now = max(self._now, mark.time)
        before = self._doing
        if mark.memory is not None:
            self.memory.append(Sample(self._now, *mark.memory))
        if not self._take_part(mark.event, mark.name):
            self._take_whole(mark.event, mark.name)
        if self._doing != before:
            if before is not None and self._now > self._since:
                kind, name, op, number = before
                self.spans.append(Span(kind, name, self._since, self._now, op, number))
            self._since = self._now

    @property
    def _doing(self) -> _Doing | None:
        return self._part or (self._under_way[-1] if self._under_way else None)

    # Parts ------------------------------------------------------------------------------------

    def _take_part(self, event: str, name: str) -> bool:
        """Take in a mark of a launch, a wait or a copy; return whether it is one."""
        if event.endswith("wait_for_copies"):
            self._part = _Doing("wait", name, "copies") if event.startswith("begin") else None
            return True
        if event == "begin_regather":
            self._regathering.add(name)
            event = "begin_all_gather"
        stage = next((stage for stage in ACTS if event.endswith(stage)), None)
        if stage is None:
            return False
        key = op, _ = self._op_of(stage, name), name
        number = self._num_flown[key]
        match event.removesuffix(stage):
            case "begin_":
                self._flying[key] = self._now
                self._part = _Doing("launch", name, op, number)
            case "begin_wait_for_":
                self._part = _Doing("wait", name, op, number)
            case "waited_for_":
                self._part = _Doing("copy", name, op, number)
                self._waited[key] = self._now
                self._land(key)
            case "wait_for_":
                self._part = None
                self._regathering.discard(name)
            case _:  # launched; one over the replicas begins where that over the shards has ended
                self._part = None
                self._flying.setdefault(key, self._waited.get(("reduce", name), self._now))
        return True

    def _op_of(self, stage: str, name: str) -> str:
        is_regather = stage == "all_gather" and name in self._regathering
        return "regather" if is_regather else ACTS[stage]

    def _land(self, key: tuple[str, str]) -> None:
        start = self._flying.pop(key, None)
        if start is not None:
            op, name = key
            flight = Flight(op, name, self._num_flown[key], start, self._now)
            self.flights.append(flight)
            self._num_flown[key] += 1

    # Wholes -----------------------------------------------------------------------------------

    def _take_whole(self, event: str, name: str) -> None:
        """Take in a mark of a forward, a backward, an optimizer, a step or a free."""
        if event == "reshard":
            self._land((self._op_of("all_gather", name), name))  # if nobody needed it
            self._regathering.discard(name)
            return
        if event in ("accumulate", "begin"):
            return
        self._part = None  # one that failed has no end
        if event in ("step", "end"):
            self._under_way.clear()
            if event == "step":
                self.steps.append(self._now)
            return
        kind = event.rpartition("_")[2]
        doing = _Doing(kind, name)
        if event.startswith("post_") or event == "optimizer":
            self._leave(doing)
            return
        if kind == "forward" and not any(one.kind == "forward" for one in self._under_way):
            self._under_way.clear()  # left by a backward or an optimizer that failed
        if kind != "backward" or doing not in self._under_way:
            self._under_way.append(doing)

    def _leave(self, doing: _Doing) -> None:
        """End what is under way, and with a forward whatever was left open in it."""
        if doing not in self._under_way:
            return
        place = len(self._under_way) - 1 - self._under_way[::-1].index(doing)
        del self._under_way[place : None if doing.kind == "forward" else place + 1]


# When something happens on a rank: on the host, or in the order of the device's work --------------


class Clock(Protocol):
    """Gives stamps while it must be quick, and times of them afterwards."""

    def stamp(self) -> Any:
        """Return what :meth:`times` turns into a time."""

    def times(self, stamps: Sequence[Any]) -> list[int]:
        """Return the nanoseconds of the host's clock at which the stamps were given."""


class HostClock:
    """The monotonic clock of the host, which all processes on it share."""

    stamp = staticmethod(time.perf_counter_ns)

    def times(self, stamps: Sequence[int]) -> list[int]:
        """Return the stamps, which are times."""
        return list(stamps)


class DeviceClock:
    """Events between the kernels of an accelerator.

    It is set by the host's clock when it is made, which waits for the device once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self.stamp()
        self._base.synchronize()
        self._base_time = time.perf_counter_ns()

    def stamp(self) -> torch.Event:
        """Record an event after the work that the current stream has so far."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def times(self, stamps: Sequence[torch.Event]) -> list[int]:
        """Wait for the device and return when it came by each event."""
        torch.accelerator.synchronize(self._device)
        return [
            self._base_time + round(self._base.elapsed_time(stamp) * 1_000_000) for stamp in stamps
        ]


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which work on ``device`` is timed."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


# How many bytes are live on a rank ----------------------------------------------------------------


class LiveMemory(NamedTuple):
    """Where live memory is read.

    Attributes:
        read: Returns what there is; ``None`` where nothing tells it.
        of: What is counted: ``device``, ``heap`` or ``nothing``.
    """

    read: Callable[[], Reading] | None
    of: str


def live_memory(device: torch.device) -> LiveMemory:
    """Return what tells the live memory of a rank that computes on ``device``."""
    if device.type == "cuda":
        return LiveMemory(partial(_of_cuda, device), "device")
    if device.type != "cpu":
        return LiveMemory(partial(_of_accelerator, device), "device")
    heap = _heap()
    return LiveMemory(heap, "nothing" if heap is None else "heap")


def _of_cuda(device: torch.device) -> Reading:
    stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
    if not stats:
        return Reading(0, 0)
    kinds = ("allocated_bytes", "reserved_bytes")
    return Reading(*(stats[kind]["all"]["current"] for kind in kinds))


def _of_accelerator(device: torch.device) -> Reading:
    of = torch.accelerator
    return Reading(of.memory_allocated(device), of.memory_reserved(device))


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _heap() -> Callable[[], Reading] | None:
    """Return what reads the bytes in use of the heap of glibc, if that is the C library."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another library, or another system
        return None
    mallinfo.restype = _MallInfo

    def read() -> Reading:
        now = mallinfo()
        return Reading(int(now.uordblks + now.hblkhd))

    return read


# What one rank recorded, and the file that holds it -----------------------------------------------


def join(prefix: str, name: str) -> str:
    """Return the name within the model of a group that is called ``name`` within its tree."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


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
        device: Where it computes.
        memory_of: What ``memory`` counts: ``device``, ``heap`` or ``nothing``.
        rank_sets: Sets of ranks that communicate.
        groups: The groups of the model.
        wall: Nanoseconds since 1970 when that clock showed ``begin``.
        begin: When recording began.
        end: When it ended.
        first_step: The number of the first step that was recorded.
        steps: When each step ended.
        spans: What it did, in order.
        flights: What was communicated.
        memory: Live and reserved memory.
    """

    rank: int
    num_ranks: int
    host: str
    clock: str
    device: str
    memory_of: str
    rank_sets: list[list[int]]
    groups: dict[str, GroupFacts]
    wall: int = 0
    begin: int = 0
    end: int = 0
    first_step: int = 0
    steps: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)

    @classmethod
    def empty(cls, roots: Mapping[str, ParamGroup], memory_of: str) -> RankTrace:
        """Return what is known of a rank before it records. Collective: none."""
        sets: dict[tuple[int, ...], int] = {}
        groups = {
            join(prefix, group.name): _facts_of(group, sets)
            for prefix, root in roots.items()
            for group in root.tree.groups
        }
        is_alone = not dist.is_initialized()
        return cls(
            rank=0 if is_alone else dist.get_rank(),
            num_ranks=1 if is_alone else dist.get_world_size(),
            host=platform.node(),
            clock=_BOOT.read_text().strip() if _BOOT.exists() else platform.node(),
            device=str(next(iter(roots.values())).mesh.device),
            memory_of=memory_of,
            rank_sets=[list(ranks) for ranks in sets],
            groups=groups,
        )

    def recorded(self, marks: Sequence[Mark], first_step: int) -> RankTrace:
        """Return the trace of a rank that has made these marks, the last one just now."""
        told = Unfolded(marks)
        # A tree that was sharded further meanwhile calls its groups otherwise: nothing is known.
        sets = [*self.rank_sets, [self.rank]]
        names = {flight.name for flight in told.flights} - self.groups.keys()
        renamed = dict.fromkeys(sorted(names), GroupFacts(0, 0, len(sets) - 1, len(sets) - 1))
        behind = time.perf_counter_ns() - marks[0].time
        return replace(
            self,
            rank_sets=sets if renamed else self.rank_sets,
            groups={**self.groups, **renamed},
            wall=time.time_ns() - behind,
            begin=marks[0].time,
            end=max(mark.time for mark in marks),
            first_step=first_step,
            steps=told.steps,
            spans=told.spans,
            flights=told.flights,
            memory=told.memory,
        )

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
            memory=[sample._replace(time=sample.time + by) for sample in self.memory],
        )

    def ranks_of(self, op: str, name: str) -> int:
        """Return the place in ``rank_sets`` of the ranks between which a collective is."""
        facts = self.groups[name]
        return facts.replica_ranks if op == "all-reduce" else facts.shard_ranks

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
            if values.pop("format") != FORMAT:
                expected = f"Expected the format '{FORMAT}'"
                raise ValueError(expected)
            groups = values["groups"].items()
            values["groups"] = {name: GroupFacts(*facts) for name, facts in groups}
            for field, kind in (("spans", Span), ("flights", Flight), ("memory", Sample)):
                values[field] = [kind(*one) for one in values[field]]
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Expected the trace of a rank in {source}, got {error!r}") from error


def _facts_of(group: ParamGroup, sets: dict[tuple[int, ...], int]) -> GroupFacts:
    nbytes = sum(p.sharded.numel() * p.compute_dtype.itemsize for p in group.params)
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
