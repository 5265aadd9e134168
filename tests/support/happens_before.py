"""PURE: which work of a device happens before which, and what memory it touches meanwhile.

Work on one stream is done in order. Between streams there is an order only where one waits for the
other, and between a stream and the host where the host waits, or launches. Each has a clock that
counts its own work and knows how far it has waited for the others (a vector clock). Of two accesses
to the same bytes, one of them a write, the later one has to know of the earlier one; otherwise they
are a race, whatever happened this time.

Memory belongs to the stream that it was allocated on, as in the caching allocator of CUDA: freed
memory is given to what that stream allocates next. So what other streams did with it has to be
known to that stream by then.

Source: Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System" (1978); the rule
for memory is that of ``torch.cuda.caching_allocator``, "Stream semantics of memory".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[str, int]

HOST = "the host"


class Stamp(NamedTuple):
    """A moment in the work of one stream, or of the host."""

    where: str
    time: int

    def is_known_to(self, clock: Clock) -> bool:
        return clock.get(self.where, 0) >= self.time


class Work(NamedTuple):
    """Something that was done: when, and what it came after."""

    op: str
    stamp: Stamp
    clock: Clock

    def precedes(self, other: Work) -> bool:
        return self.stamp.is_known_to(other.clock)

    def is_beside(self, other: Work) -> bool:
        return not self.precedes(other) and not other.precedes(self)


class Order:
    """The clocks of all streams and of the host, which launches everything."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {HOST: {HOST: 0}}

    def work(self, where: str, op: str) -> Work:
        """Do something on a stream, which the host launches now; or on the host itself."""
        clock = self._clocks.setdefault(where, {})
        _join(clock, self._clocks[HOST])
        clock[where] = clock.get(where, 0) + 1
        return Work(op, Stamp(where, clock[where]), dict(clock))

    def moment(self, where: str) -> Clock:
        """Return what is known once a stream has come this far; an event."""
        return dict(self._clocks.setdefault(where, {}))

    def wait(self, where: str, moment: Clock) -> None:
        """Let a stream, or the host, continue after a moment."""
        _join(self._clocks.setdefault(where, {}), moment)

    def knows(self, where: str, stamp: Stamp) -> bool:
        """Tell whether what a stream does next comes after ``stamp``."""
        clock = self._clocks.get(where, {})
        return stamp.is_known_to(clock) or stamp.is_known_to(self._clocks[HOST])


def _join(clock: Clock, other: Clock) -> None:
    for where, time in other.items():
        if clock.get(where, 0) < time:
            clock[where] = time


# Memory -------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Bytes from ``begin`` to ``end``, by their addresses."""

    begin: int
    end: int

    def meets(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end

    def holds(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class _Access(NamedTuple):
    span: Span
    is_write: bool
    work: Work


@dataclass
class Block:
    """Memory that was allocated as a whole, on the stream of its owner, to which it goes back.

    The allocator keeps pinned memory of the host from others until copies have been made, and any
    memory from all until the ``recorded`` streams are done, as ``Tensor.record_stream`` asks for.
    """

    span: Span
    owner: str
    is_of_host: bool = False
    comes_from: str = ""
    recorded: set[str] = field(default_factory=set)
    accesses: list[_Access] = field(default_factory=list)

    @property
    def device_nbytes(self) -> int:
        return 0 if self.is_of_host else self.span.end - self.span.begin


class Memory:
    """All blocks that are alive, and what touches them; bytes are counted without the host's."""

    def __init__(self, order: Order) -> None:
        self.faults: list[str] = []
        self.nbytes = self.peak_nbytes = 0
        self._order = order
        self._begins: list[int] = []
        self._blocks: list[Block] = []
        self._freed: dict[str, list[Block]] = {}  # by the stream that may allocate them next

    def find(self, address: int) -> Block | None:
        place = bisect_right(self._begins, address) - 1
        if place < 0 or address >= self._blocks[place].span.end:
            return None
        return self._blocks[place]

    def add(self, block: Block, *, is_allocated: bool = True) -> None:
        """Record a new or unknown block; forget earlier facts about its bytes."""
        if is_allocated and not block.is_of_host:
            self._reuse(block.owner)
        first = bisect_left(self._begins, block.span.begin)
        if first and self._blocks[first - 1].span.end > block.span.begin:
            first -= 1
        last = bisect_left(self._begins, block.span.end)
        self.nbytes += block.device_nbytes - sum(b.device_nbytes for b in self._blocks[first:last])
        self.peak_nbytes = max(self.nbytes, self.peak_nbytes)
        self._begins[first:last] = [block.span.begin]
        self._blocks[first:last] = [block]

    def free(self, block: Block) -> None:
        """Give a block back to the stream of its allocation, for what that one allocates next."""
        place = bisect_left(self._begins, block.span.begin)
        if place == len(self._blocks) or self._blocks[place] is not block:
            return  # its bytes were found to be part of other memory
        del self._begins[place], self._blocks[place]
        self.nbytes -= block.device_nbytes
        if not block.is_of_host:
            self._freed.setdefault(block.owner, []).append(block)

    def _reuse(self, owner: str) -> None:
        """Find what a stream should have waited for before it allocates what has been freed."""
        for block in self._freed.pop(owner, []):
            for access in block.accesses:
                stamp = access.work.stamp
                if stamp.where not in block.recorded and not self._order.knows(owner, stamp):
                    self.faults.append(
                        f"Memory of {block.comes_from} has gone back to {owner}, which allocates "
                        f"again and does not wait for {access.work.op} on {stamp.where}, which "
                        f"{_verb(access)} it"
                    )
                    break

    def touch(self, work: Work, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        """Note what some work reads and writes; find what it should have waited for."""
        for is_write, spans in ((False, reads), (True, writes)):
            for span in spans:
                block = self.find(span.begin)
                if block is not None:
                    self._access(block, _Access(span, is_write, work))

    def _access(self, block: Block, access: _Access) -> None:
        work, kept = access.work, list[_Access]()
        for earlier in block.accesses:
            is_known = earlier.work.stamp.is_known_to(work.clock)
            is_conflict = access.is_write or earlier.is_write
            if is_conflict and not is_known and earlier.span.meets(access.span):
                self.faults.append(
                    f"{work.op} on {work.stamp.where} {_verb(access)} memory of "
                    f"{block.comes_from} and does not wait for {earlier.work.op} on "
                    f"{earlier.work.stamp.where}, which {_verb(earlier)} it"
                )
            is_covered = is_known and access.span.holds(earlier.span)
            is_same = access.work.stamp.where == earlier.work.stamp.where
            if not is_covered or not (access.is_write or (is_same and not earlier.is_write)):
                kept.append(earlier)
        block.accesses = [*kept, access]


def _verb(access: _Access) -> str:
    return "writes" if access.is_write else "reads"
