"""``trace``: a timeline of the time and the memory of training on every rank.

A wait in the forward of a module splits the forward into two spans.

A device works asynchronously to the host. Its clock records events among the kernels, and reads
their times at the end, so that recording waits for nothing.

On an accelerator the caching allocator reports the live memory and the memory that it has reserved.
The difference is cached, or lost to fragmentation. On the CPU nothing counts tensors, but the C
library reports how much of its heap is in use, which falls when a tensor is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers

from composable_shard import _torch
from composable_shard.arguments import check_int, check_module, check_path
from composable_shard.core.group import ParamGroup
from composable_shard.insight.events import groups_in, listening, name_in
from composable_shard.insight.merging import (
    GATHERS,
    GroupFacts,
    MergedTrace,
    RankTrace,
    Sample,
    Span,
    clear,
    file_of,
    merge,
    write,
)

__all__ = ["MergedTrace", "Timeline", "merge", "trace"]

# From the marks of one rank to spans --------------------------------------------------------------

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
        self._open = list[Span]()  # forwards, backwards, optimizer steps; in the last one a part
        self._since = self._now = 0
        self._gathers: dict[str, str] = {}  # how each group was gathered last
        self._launched: dict[tuple[str, str], int] = {}  # when the flight began
        self._num_flown = Counter[tuple[str, str]]()
        for mark in marks:
            self._read(mark)

    def _read(self, mark: Mark) -> None:
        """Read the next mark; a time before that of the last mark counts as that moment."""
        self._now = max(self._now, mark.time)
        if mark.memory is not None:
            self.memory.append(Sample(self._now, *mark.memory))
        before = self._open[-1:]
        part = _PART.fullmatch(mark.event)
        if part is not None:
            moment, stage = part.groups()
            self._read_part(moment, stage, mark.name)
        elif mark.event == "reshard":  # the gather ends here if nothing waited for it
            self._land(self._gathers.get(mark.name, "gather"), mark.name)
        elif mark.event != "accumulate":
            self._read_whole(mark.event, mark.name)
        if self._open[-1:] != before:
            if before and self._now > self._since:
                self.spans.append(before[0]._replace(start=self._since, end=self._now))
            self._since = self._now

    def _end_part(self) -> None:
        """End the launch, wait or copy in progress; the next mark shows that it has ended."""
        if self._open and self._open[-1].op:
            self._open.pop()

    def _read_part(self, moment: str, stage: str, name: str) -> None:
        """Read a mark of a launch, a wait or a copy."""
        self._end_part()
        op = OPS.get(stage, stage)
        if op in GATHERS:
            if moment == "begin_":
                self._gathers[name] = op
            op = self._gathers.get(name, op)
        if moment in _PART_BEGINS:
            number = self._num_flown[op, name] if stage in OPS else -1
            self._open.append(Span(_PART_BEGINS[moment], name, op=op, number=number))
        if moment == "begin_":
            self._launched[op, name] = self._now
        elif moment == "waited_for_":
            self._land(op, name)
            if op == "reduce":  # which an all-reduce may follow
                self._launched["all-reduce", name] = self._now

    def _land(self, op: str, name: str) -> None:
        start = self._launched.pop((op, name), None)
        if start is not None:
            number = self._num_flown[op, name]
            self.flights.append(Span(op, name, start, self._now, op, number))
            self._num_flown[op, name] += 1

    def _read_whole(self, event: str, name: str) -> None:
        """Read a mark of a forward, a backward, an optimizer or a step."""
        self._end_part()
        kind, wholes = event.rpartition("_")[2], self._open
        doing = Span(kind, name)
        if event in ("step", "end"):
            wholes.clear()
            self.steps += [self._now] if event == "step" else []
        elif event.startswith(("pre_", "begin_")):
            if kind == "forward" and all(whole.kind != "forward" for whole in wholes):
                wholes.clear()  # left by a backward or an optimizer that failed
            if kind != "backward" or doing not in wholes:
                wholes.append(doing)
        elif doing in wholes and kind == "forward":
            while wholes.pop() != doing:  # it ends everything that was left open in it
                pass
        elif doing in wholes:
            wholes.remove(doing)


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


# The recording --------------------------------------------------------------------------------

MAX_MERGED = 64
"""The last rank merges up to this many ranks. Merging more would block it for long."""

# Reading memory takes longer than a time stamp: it is read after allocations and before frees.
READS_MEMORY = {
    *("begin", "all_gather", "post_forward", "reshard", "post_backward"),
    *("reduce_scatter", "wait_for_reduce_scatter", "wait_for_all_reduce"),
    *("begin_optimizer", "optimizer", "step", "end"),
}


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _facts_of(group: ParamGroup) -> GroupFacts:
    nbytes = sum(p.sharded.numel() * p.compute_dtype.itemsize for p in group.params)
    mesh = group.params[0].mesh if group.params else group.mesh  # of several, the first one
    shards, replicas = (
        dist.get_rank() if ranks is None else dist.get_process_group_ranks(ranks)[0]
        for ranks in (mesh.shard_group, mesh.replica_group)
    )
    return GroupFacts(nbytes, shards, replicas)


class Timeline:
    """The recording that :func:`trace` makes on this rank.

    Attributes:
        recorded: What this rank recorded; ``None`` until recording has ended.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path | None = None,
        *,
        skip: int = 0,
        steps: int | None = None,
        clock: Clock | None = None,
        memory: LiveMemory | None = None,
    ) -> None:
        check_module("module", module)
        check_int("skip", skip, 0)
        if steps is not None:
            check_int("steps", steps, 1)
        self._names = {inner: name for name, inner in module.named_modules()}
        trees = dict.fromkeys(group.tree for group in groups_in(module))
        groups = [group for tree in trees for group in tree.groups]
        device = groups[0].mesh.device
        memory = memory or live_memory(device)
        self._clock, self._read_memory = clock or clock_of(device), memory.read
        self._empty = RankTrace(
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            clock=_BOOT.read_text().strip() if _BOOT.exists() else platform.node(),
            device=str(device),
            memory_of=memory.of,
            groups={self._name_of(group): _facts_of(group) for group in groups},
        )
        self.recorded: RankTrace | None = None
        self._module, self._folder, self._skip, self._num_steps = module, folder, skip, 0
        self._last = None if steps is None else skip + steps
        self._marks: list[tuple[Any, str, str, Bytes | None]] = []  # none but while it records
        self._hooks = contextlib.ExitStack()
        if folder is not None:
            clear(folder, self._empty.rank, self._empty.num_ranks)
        if skip == 0:
            self._open()

    def _name_of(self, group: ParamGroup) -> str:
        return name_in(self._names, group) or group.name

    def step(self) -> None:
        """Mark the end of a training step.

        Example:
            >>> with fake_ranks(2):
            ...     model = fully_shard(nn.Linear(4, 4))
            ...     with trace(model, skip=1, steps=2) as timeline:
            ...         for _ in range(10):
            ...             timeline.step()
            >>> timeline.summary()["first_step"], timeline.summary()["num_steps"]
            (1, 2)
        """
        self._num_steps += 1
        if self._marks:
            self._mark("step")
        elif self._num_steps == self._skip:
            self._open()
        if self._num_steps == self._last:
            self.stop()

    def stop(self) -> None:
        """End recording, write this rank's file, and merge all if it is the last; idempotent.

        Collective: none. Ranks that never call it are missing from the merged timeline.

        Example:
            >>> with fake_ranks(2), trace(fully_shard(nn.Linear(4, 4))) as timeline:
            ...     timeline.stop()
            >>> timeline.recorded.num_ranks
            2
        """
        if not self._marks:
            return
        self._hooks.close()
        self._mark("end")
        stamps, *others = zip(*self._marks, strict=True)
        self._marks.clear()
        marks = list(map(Mark, self._clock.times(stamps), *others))
        unfolded, begin = Unfolded(marks), marks[0].time
        self.recorded = replace(
            self._empty,
            wall=time.time_ns() - (time.perf_counter_ns() - begin),
            begin=begin,
            end=max(mark.time for mark in marks),
            first_step=self._skip,
            steps=unfolded.steps,
            spans=unfolded.spans,
            flights=unfolded.flights,
            memory=unfolded.memory,
        )
        if self._folder is not None:
            try:
                self._write(self._folder, self.recorded)
            except (OSError, ValueError) as error:  # no reason to end a training
                warnings.warn(
                    f"Expected to write a timeline to {self._folder}, got {error!r}; merge the "
                    "written files by `composable-shard trace`",
                    stacklevel=2,
                )

    def _write(self, folder: Path, recorded: RankTrace) -> None:
        write(file_of(folder, recorded.rank), recorded.to_json())
        files = [file_of(folder, rank) for rank in range(recorded.num_ranks)]
        if len(files) <= MAX_MERGED and all(file.exists() for file in files):
            merge(folder)

    def summary(self) -> dict[str, Any]:
        """Return the sums over this rank's steps; see ``merge(folder).summary`` for all ranks.

        Raises:
            ValueError: If nothing is recorded yet.

        Example:
            >>> with fake_ranks(2), trace(fully_shard(nn.Linear(4, 4))) as timeline:
            ...     timeline.step()
            >>> timeline.summary()["exposed_ms"]
            0.0
        """
        if self.recorded is None:
            state = "not ended" if self._marks else "not begun"
            raise ValueError(f"Expected a recording that has ended, got one that has {state}")
        return MergedTrace.of([self.recorded]).summary

    def _open(self) -> None:
        self._mark("begin")
        self._hooks.enter_context(listening(groups_in(self._module), self._mark_group))
        begin = partial(self._mark_step, "begin_optimizer")
        end = partial(self._mark_step, "optimizer")
        self._hooks.enter_context(optimizers.register_optimizer_step_pre_hook(begin))
        self._hooks.enter_context(optimizers.register_optimizer_step_post_hook(end))

    def _mark(self, event: str, name: str = "") -> None:
        read = self._read_memory if event in READS_MEMORY else None
        memory = None if read is None else read()
        self._marks.append((self._clock.stamp(), event, name, memory))

    def _mark_group(self, event: str, group: ParamGroup) -> None:
        self._mark(event, self._name_of(group))

    def _mark_step(self, event: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not stepped.isdisjoint(map(id, self._module.parameters())):  # it is of this model
            self._mark(event, type(optimizer).__name__)


@contextlib.contextmanager
def trace(
    module: nn.Module, folder: str | Path | None = None, *, skip: int = 0, steps: int | None = None
) -> Iterator[Timeline]:
    """Record where the time and the memory of training go on this rank.

    The timeline has gathers, waits, forward and backward of each group, reductions, optimizer
    steps, live memory and, on a device, reserved memory. Each rank writes a file of its own when it
    leaves the context, also by an exception. The last one of at most 64 ranks merges all files into
    ``trace.json`` (for https://ui.perfetto.dev) and ``timeline.html``. No rank waits for another.
    See ``docs/timeline.md``.

    Args:
        module: A sharded module, or one with sharded modules in it.
        folder: The folder to write to, the same for all ranks; nothing is written if absent.
        skip: Steps to skip before recording; a step ends where ``timeline.step()`` is called.
        steps: Steps to record; by default recording ends with the context.

    Returns:
        A :class:`Timeline`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If nothing in the module is sharded, or a number is out of range.

    Collective: none. Memory: about 200 bytes for each event; a group has some thirty events in a
    step.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> with fake_ranks(2):
        ...     for layer in model:
        ...         _ = fully_shard(layer)
        ...     with trace(fully_shard(model)) as timeline:
        ...         model(torch.ones(2, 4)).sum().backward()
        ...         timeline.step()
        >>> [f"{flight.op} {flight.name}" for flight in timeline.recorded.flights]
        ['gather 0', 'gather 1', 'gather 1', 'gather 0', 'reduce 1', 'reduce 0']
    """
    check_path("folder", folder, is_needed=False)
    timeline = Timeline(module, None if folder is None else Path(folder), skip=skip, steps=steps)
    try:
        yield timeline
    finally:
        timeline.stop()
