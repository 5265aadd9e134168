"""PURE: from the marks of one rank to spans.

At every moment a rank does one thing, so spans neither overlap nor nest: where a wait falls into
the forward of a module, the forward is two spans with the wait between them. What is communicated
meanwhile are flights, from the launch of a collective until it has been waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

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


class Unfolded(NamedTuple):
    """What the marks of a rank say.

    Attributes:
        spans: What it did, in order.
        flights: What was communicated, by when it ended.
        steps: When each step ended.
        memory: Live and reserved memory, where it was asked.
    """

    spans: list[Span]
    flights: list[Flight]
    steps: list[int]
    memory: list[Sample]


class _Doing(NamedTuple):
    kind: str
    name: str
    op: str = ""
    number: int = -1


def unfold(marks: Iterable[Mark]) -> Unfolded:
    """Turn the marks of one rank, in the order in which they were made, into spans.

    Example:
        >>> marks = [Mark(0, "pre_forward", "0"), Mark(5, "begin_wait_for_all_gather", "0")]
        >>> marks += [Mark(7, "waited_for_all_gather", "0"), Mark(7, "wait_for_all_gather", "0")]
        >>> marks += [Mark(9, "post_forward", "0")]
        >>> [(span.kind, span.start, span.end) for span in unfold(marks).spans]
        [('forward', 0, 5), ('wait', 5, 7), ('forward', 7, 9)]
    """
    reader = _Reader()
    for mark in marks:
        reader.read(mark)
    return reader.unfolded


class _Reader:
    """Reads marks one by one.

    Attributes:
        unfolded: What they said so far.
    """

    def __init__(self) -> None:
        self.unfolded = Unfolded([], [], [], [])
        self._under_way: list[_Doing] = []  # forwards, backwards and optimizer steps
        self._part: _Doing | None = None  # a launch, wait or copy within them
        self._since = 0
        self._now = 0
        self._flying: dict[tuple[str, str], int] = {}  # when the launch began
        self._waited: dict[tuple[str, str], int] = {}
        self._regathering: set[str] = set()
        self._num_flown: Counter[tuple[str, str]] = Counter()

    def read(self, mark: Mark) -> None:
        """Take in the next mark; one that seems to come before the last counts as that moment."""
        self._now = max(self._now, mark.time)
        before = self._doing
        if mark.memory is not None:
            self.unfolded.memory.append(Sample(self._now, *mark.memory))
        if not self._take_part(mark.event, mark.name):
            self._take_whole(mark.event, mark.name)
        if self._doing != before:
            if before is not None and self._now > self._since:
                kind, name, op, number = before
                self.unfolded.spans.append(Span(kind, name, self._since, self._now, op, number))
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
            self.unfolded.flights.append(flight)
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
                self.unfolded.steps.append(self._now)
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
