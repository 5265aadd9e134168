"""A collective of ranks of one host: each rank publishes tensors, and reads those of the others.

A message lies in a slab, a block of the sender's shared memory: first a table of the tensors, then
the tensors. ``mailbox.py`` publishes the message, and tracks when its slab is free again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport import failures
from composable_shard.core.transport.gloo.mailbox import GIVEN_UP, Entry, Mailbox, mailbox_of
from composable_shard.core.transport.gloo.shared_memory import View

Memories = Sequence[_torch.MappableMemory | None]

copy_bytes = ctypes.memmove  # by this name, `benchmarks/copies.py` counts it

# The layout of a slab -----------------------------------------------------------------------------

_DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
]  # the table refers to a dtype by its index in this list
_ALIGNMENT = 64  # bytes


class MessageSpec(NamedTuple):
    """The tensors of a message, each of which consists of equal parts.

    Attributes:
        numels: For each tensor, the number of elements of one part.
        dtypes: The dtype of each tensor.
        num_parts: The number of parts of each tensor, laid end to end, such as one for each rank.
        page_offsets: For each tensor, the offset within a page at which readers place the part of
            rank 0, followed by those of the other ranks, if they map pages; otherwise -1.
    """

    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    num_parts: int
    page_offsets: tuple[int, ...]

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], num_parts: int = 1, page_offsets: Sequence[int] = ()
    ) -> MessageSpec:
        """Return the spec of a message of these tensors."""
        numels = tuple(tensor.numel() // num_parts for tensor in tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        return cls(numels, dtypes, num_parts, tuple(page_offsets) or (-1,) * len(numels))

    @property
    def sizes(self) -> list[int]:
        """The bytes of one part of each tensor."""
        return [numel * dtype.itemsize for numel, dtype in zip(*self[:2], strict=True)]


class _SlabLayout(NamedTuple):
    """The layout of a message in a slab.

    Attributes:
        table: The table at the beginning, which lists the tensors.
        offsets: The offset of each tensor, in bytes.
        nbytes: The size of the slab.
    """

    table: bytes
    offsets: tuple[int, ...]
    nbytes: int


@lru_cache(maxsize=1 << 14)  # for every group of parameters and rank of this host
def _plan_slab(spec: MessageSpec, rank: int) -> _SlabLayout:
    words = [len(spec.numels)]
    for numel, dtype, page_offset in zip(*spec[:2], spec.page_offsets, strict=True):
        words += [_DTYPES.index(dtype), numel, page_offset]
    table = bytes(memoryview((ctypes.c_int64 * len(words))(*words)))
    end, offsets = len(table), list[int]()
    for nbytes, page_offset in zip(spec.sizes, spec.page_offsets, strict=True):
        if page_offset < 0:
            end += -end % _ALIGNMENT
        else:
            end += (page_offset + rank * nbytes - end) % mmap.PAGESIZE
        offsets.append(end)
        end += spec.num_parts * nbytes
    return _SlabLayout(table, tuple(offsets), end)


# One collective -----------------------------------------------------------------------------------

_NUM_YIELDS = 20  # polls before the first sleep
_SLEEPS = 2e-5, 1e-3  # seconds of the shortest and the longest sleep
_SLEEP_SHARE = 0.1  # the length of a sleep, as a share of the time waited so far
_CHECK_INTERVAL = 0.05  # seconds between two checks whether the other rank has ended
_RESIDENT_NBYTES = 1 << 20  # of its own message, which a rank has in its resident memory at most


class Exchange:
    """A collective: each rank publishes tensors, and reads those of the others.

    Args:
        group: The process group.
        tag: The tag of the messages, which the ranks have agreed on.
        ranks: The ranks to exchange with; each of them exchanges with this one.
        spec: The spec of this rank's message.
        tensors: The tensors of the message; ``None`` if no rank reads them.

    Attributes:
        spec: The spec of this rank's message.

    Raises:
        ShardError: Here and in all methods, if a rank has ended, has given up, or does not publish
            within the time-out of the process group. Later collectives of the group then
            raise, too.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        ranks: Sequence[int],
        spec: MessageSpec,
        tensors: Sequence[torch.Tensor] | None,
    ) -> None:
        self._unread: list[int] = []
        self._views: list[View] = []
        self._is_mapped = self._has_slab = False
        self._is_published = True  # not yet, but without a key, `__del__` must do nothing
        mailbox = mailbox_of(group)
        assert mailbox is not None
        self._group, self.spec = group, spec
        self._mailbox: Mailbox = mailbox
        self._record_given_up = mailbox.given_up.append
        mailbox.catch_up()
        self._key = mailbox.next_key(tag)
        self._unread = list(ranks)  # from here on, `__del__` gives up an unfinished exchange
        self._is_published = False
        self._layout = layout = _plan_slab(spec, group.rank())
        slab = mailbox.allocate_slab(len(layout.table) if tensors is None else layout.nbytes)
        self._slab, slab.is_held, self._has_slab = slab, True, True
        ctypes.memmove(slab.address, layout.table, len(layout.table))
        nbytes = 0
        for tensor, offset in zip(tensors or (), layout.offsets, strict=False):
            copy_bytes(slab.address + offset, tensor.data_ptr(), tensor.nbytes)
            nbytes += tensor.nbytes
            if nbytes >= _RESIDENT_NBYTES:
                slab.forget_pages()
                nbytes = 0
        publish = partial(mailbox.publish, self._key, slab, list(ranks))
        if not publish():
            for rank in ranks:  # one by one, so that the error names a late rank
                self._wait(rank, partial(mailbox.poll_room, [rank]))
            self._wait(ranks[0], publish)  # no slot is free; any rank may be late
        self._is_published = True

    def read(
        self, rank: int, part: int = 0, dtypes: Sequence[torch.dtype] = ()
    ) -> list[torch.Tensor]:
        """Wait for a rank's message; return its tensors, which are valid until :meth:`finish`.

        Args:
            rank: The rank; it may be this one.
            part: The part of each tensor.
            dtypes: The expected dtypes; any if absent.

        Raises:
            RankMismatchError: If the number of tensors or their sizes differ from those of this
                rank, or their dtypes from ``dtypes``.
        """
        view, spec, layout = self._find(rank, dtypes)
        return [
            view.tensor(offset + part * numel * dtype.itemsize, numel, dtype)
            for offset, numel, dtype in zip(layout.offsets, *spec[:2], strict=True)
        ]

    def _find(
        self, rank: int, dtypes: Sequence[torch.dtype]
    ) -> tuple[View, MessageSpec, _SlabLayout]:
        """Wait for a rank's message; return where it is, and what it has."""
        if rank == self._group.rank():
            return self._slab, self.spec, self._layout
        entry = self._entry(rank)
        view = self._mailbox.peers[rank].file.view(entry.start, entry.nbytes)
        self._views.append(view)
        spec, layout = self.spec, _plan_slab(self.spec, rank)
        if view.bytes(len(layout.table)) != layout.table:
            spec = self._spec_of(view, rank, entry.nbytes)
            layout, expected = _plan_slab(spec, rank), tuple(dtypes) or spec.dtypes
            if spec.numels != self.spec.numels or spec.dtypes != expected:
                raise failures.mismatch(
                    self._group,
                    rank,
                    f"{list(self.spec.numels)} elements of {list(expected)}",
                    f"{list(spec.numels)} elements of {list(spec.dtypes)}",
                )
        return view, spec, layout

    def _entry(self, rank: int) -> Entry:
        """Wait for the entry of a rank's message."""
        find = partial(self._mailbox.find_entry, self._mailbox.peers[rank], self._key)
        entry: Entry = find() or self._wait(rank, find)
        if entry.nbytes == GIVEN_UP:
            raise failures.missing_rank(self._group, rank, "a notice that it has given up")
        return entry

    def _spec_of(self, view: View, rank: int, nbytes: int) -> MessageSpec:
        """Return the spec of an unexpected message."""
        num_tensors = int.from_bytes(view.bytes(8), sys.byteorder)
        if not 0 <= num_tensors <= nbytes // 24:
            raise failures.missing_rank(self._group, rank, "an incomplete message")
        words = memoryview(view.bytes(8 + 24 * num_tensors)).cast("q")[1:].tolist()
        dtypes = tuple(_DTYPES[number] for number in words[::3])
        return MessageSpec(tuple(words[1::3]), dtypes, self.spec.num_parts, tuple(words[2::3]))

    def place(self, rank: int, addresses: Sequence[int], memories: Memories) -> None:
        """Wait for a rank's message; copy its tensors, or map their pages.

        Args:
            rank: The rank; it may be this one.
            addresses: The address for each tensor, in this process.
            memories: The memory at each address, if it can be mapped.

        Raises:
            RankMismatchError: See :meth:`read`.
        """
        (block, _, layout), page = self._find(rank, self.spec.dtypes), mmap.PAGESIZE
        for offset, nbytes, address, memory in zip(
            layout.offsets, self.spec.sizes, addresses, memories, strict=True
        ):
            source, ahead = block.address + offset, -address % page  # bytes before the first page
            num_mapped, start = (nbytes - ahead) // page * page, block.start + offset + ahead
            if (
                memory is None
                or start % page
                or not memory.map(address + ahead, num_mapped, block.file, start, self)
            ):
                copy_bytes(address, source, nbytes)
                continue
            self._is_mapped = True
            done = ahead + num_mapped
            copy_bytes(address, source, ahead)
            copy_bytes(address + done, source + done, nbytes - done)

    def forget_pages(self) -> None:
        """Release the read pages from the resident memory of this rank, until the next read."""
        for view in (self._slab, *self._views):
            view.forget_pages()

    def finish(self) -> None:
        """Acknowledge the messages of the other ranks, unless some are mapped.

        Mapped memory keeps this object, and `__del__` lets the messages be acknowledged.
        """
        self.forget_pages()
        self._views.clear()
        if self._is_mapped:
            return
        self._slab.is_held = self._has_slab = False
        if self._unread:
            self._mailbox.acknowledge(self._key, self._unread)  # empties the list

    def __del__(self) -> None:
        """Record that this rank gives up an unfinished exchange."""
        if self._views:
            self.forget_pages()
        if self._has_slab:
            self._slab.is_held = False
        if self._unread or not self._is_published:
            self._record_given_up((self._key, self._unread, self._is_published))

    def _wait(self, rank: int, poll: Callable[[], Any]) -> Any:
        """Poll until a result of ``poll`` is true; return this result."""
        for _ in range(_NUM_YIELDS):
            if result := poll():
                return result
            os.sched_yield()
        failures.raise_if_lost(self._group)
        peer, start = self._mailbox.peers[rank], time.monotonic()
        last_check = now = start
        shortest, longest = _SLEEPS
        while True:
            time.sleep(min(longest, max(shortest, _SLEEP_SHARE * (now - start))))
            now, got = time.monotonic(), None
            if now - last_check > _CHECK_INTERVAL:
                last_check = now
                failure = failures.failure_in(self._group)
                if failure is not None:
                    got = f"the message that {failure}"
                elif peer.file.process_has_ended():
                    got = failures.ENDED
                elif now - start > (time_out := _torch.timeout_of(self._group)):
                    got = f"no message within the time-out of {time_out:.0f} s"
            if result := poll():  # a rank that has ended may have published before
                return result
            if got is not None:
                raise failures.missing_rank(self._group, rank, got)
