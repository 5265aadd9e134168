"""A gather whose result lies once in memory, for all ranks of a host.

The first rank of the process group takes a slab of the common file, long enough for what all
gather, writes its shards into their places there, and shows it to the others. Each of them writes
its own likewise and says so. Who has heard that of all others computes from the slab, and tells the
first one when it does so no more; then the slab may be taken again. So a rank copies its own shard
and nothing else, and the unsharded parameters are no more memory for many ranks than for one.

A rank maps the slab privately. What it writes into unsharded parameters by itself, it alone sees,
and only until they are freed, as if it had a copy.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.exchange import HostCollective
from composable_shard.core.transport.failures import mismatch
from composable_shard.core.transport.mailbox import NO_MEMORY, WRITTEN, Entry, mailbox_of
from composable_shard.core.transport.shared_memory import FIRST, CommonFile, Lease, Slab
from composable_shard.errors import CommunicationError, ShardError

_ALIGNMENT = 64  # bytes

Region = tuple[int, int]
"""Of a buffer, its number, and where something begins in it; the number is -1 for what has none."""


class _Plan(NamedTuple):
    """Where everything lies in a slab.

    Attributes:
        buffers: Where each buffer begins.
        outputs: Where each output begins.
        nbytes: How long the slab is at least.
        digest: A number that differs for every other plan.
    """

    buffers: tuple[int, ...]
    outputs: tuple[int, ...]
    nbytes: int
    digest: int


@lru_cache(maxsize=1024)
def _plan(
    buffers: tuple[int, ...], regions: tuple[Region, ...], sizes: tuple[int, ...], kinds: str
) -> _Plan:
    """Plan a slab.

    Args:
        buffers: How many bytes each buffer has.
        regions: Of each output.
        sizes: How many bytes each output has.
        kinds: The dtypes of the outputs.
    """
    end, starts = 0, list[int]()
    for nbytes in buffers:
        starts.append(end)
        end += nbytes + -nbytes % _ALIGNMENT
    outputs = list[int]()
    for (number, offset), nbytes in zip(regions, sizes, strict=True):
        if number >= 0:
            outputs.append(starts[number] + offset)
        else:
            outputs.append(end)
            end += nbytes + -nbytes % _ALIGNMENT
    text = repr((buffers, regions, sizes, kinds)).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    return _Plan(tuple(starts), tuple(outputs), end, digest)


def have_common_memory(group: dist.ProcessGroup) -> bool:
    """Tell whether all ranks of ``group`` can compute from the same memory. Collective: once."""
    mailbox = mailbox_of(group)
    return mailbox is not None and mailbox.shared.common is not None


class CommonGather(HostCollective):
    """One gather of the ranks of a host, which has been launched.

    Hazard: a rank takes what it reads in a slab for what all have written. Guard: it waits for all
    others first, whatever memory its buffers have already. Test: ``test_a_planted_fault_is_seen``.

    Hazard: two threads write the same shards, or one does again after an interrupt. Guard: a lock,
    and nothing is done twice that must not be. Tests: ``test_one_thread_writes_what_two_could`` and
    ``test_a_rank_that_is_interrupted_while_it_writes_goes_on``.

    Args:
        group: The process group; all of its ranks :func:`have_common_memory`.
        tag: A number on which the ranks have agreed.
        buffers: Tensors that fill their storages. Those that have no memory are going to lie in the
            slab; into others the result is copied.
        outputs: What to gather, [N * n] each. Those that are no parts of buffers are copied out.
        inputs: The shards of this rank, [n] each; kept until they are written.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        buffers: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._rank = group.rank()
        super().__init__(group, tag, [peer for peer in range(group.size()) if peer != self._rank])
        self._buffers, self._outputs, self._inputs = list(buffers), list(outputs), list(inputs)
        numbers = {number: i for i, number in enumerate(_torch.storage_numbers(buffers))}
        self._regions = tuple(
            (numbers.get(number, -1), out.storage_offset() * out.itemsize)
            for number, out in zip(_torch.storage_numbers(outputs), outputs, strict=True)
        )
        self._plan = _plan(
            tuple([buffer.nbytes for buffer in buffers]),
            tuple([region if region[0] >= 0 else (-1, 0) for region in self._regions]),
            tuple([out.nbytes for out in outputs]),
            ",".join([str(out.dtype) for out in outputs]),
        )
        self._lease: Lease | None = None
        self._has_slab: list[bool] = []  # by buffer
        self._writing = threading.Lock()
        if self._rank == FIRST:
            self._show_slab()
        else:
            self._mailbox.write_later(self)
            self.write_if_it_can()

    @property
    def _common(self) -> CommonFile:
        common = self._mailbox.shared.common
        assert common is not None
        return common

    def _show_slab(self) -> None:
        plan, mailbox, slab = self._plan, self._mailbox, None
        try:
            slab = mailbox.take_common_slab(plan.nbytes)
            on_end = partial(_stop_holding, slab)
            self._lease = self._common.lease(slab.start, slab.nbytes, on_end)
        except ShardError:  # on all ranks, which then may go on
            if slab is not None:
                mailbox.give_back_common(slab)
            self._publish(partial(mailbox.tell, self._key, NO_MEMORY, self._ranks))
            self._unread.clear()  # nothing comes of it
            raise
        self._write()
        self._publish(partial(mailbox.publish, self._key, slab, self._ranks, plan.digest))

    def write_if_it_can(self) -> None:
        """Write the shards of this rank, unless there is no slab yet; on any thread."""
        if not self._writing.acquire(blocking=False):
            return  # somebody does
        try:
            if not self._is_published and self._mailbox.has_room(self._ranks):
                entry = self._mailbox.look(self._mailbox.peers[FIRST], self._key)
                if entry is not None and entry.nbytes >= 0 and entry.form == self._plan.digest:
                    self._write_into(entry)
        finally:
            self._writing.release()

    def _write_into(self, entry: Entry) -> None:
        key = self._key
        self._mailbox.write_no_more(self)  # if this fails, who waits tries again, or nobody
        if self._lease is None:
            on_end = partial(self._note, (key, [FIRST], True))
            self._lease = self._common.lease(entry.start, entry.nbytes, on_end)
        if FIRST in self._unread:
            self._unread.remove(FIRST)  # which the lease tells
        self._write()
        tell = self._mailbox.tell
        self._publish(partial(tell, key, WRITTEN, self._ranks, self._plan.digest))

    def _write(self) -> None:
        """Write the shards of this rank; let the buffers have the slab, whose rest is to come."""
        lease = self._lease
        assert lease is not None
        if self._buffers:
            self._has_slab = [
                _torch.adopt(buffer, lease.address + start, lease)
                for buffer, start in zip(self._buffers, self._plan.buffers, strict=True)
            ]
            self._buffers.clear()
        begin = lease.common
        for place, own in zip(self._plan.outputs, self._inputs):  # noqa: B905 (none if written)
            nbytes = own.nbytes
            ctypes.memmove(begin + place + self._rank * nbytes, own.data_ptr(), nbytes)
        self._inputs.clear()
        lease.forget_written()

    def wait(self) -> bool:
        """Wait until all have written; give the buffers their memory."""
        if not self._outputs:
            return True
        self._mailbox.refuse_fork()  # there, nobody lets go of a lock that was held meanwhile
        with self._writing:
            if not self._is_published:
                self._write_into(self._checked(FIRST))
        for rank in self._unread:
            self._checked(rank)
        self.finish()
        self._copy_out()
        return True

    def _checked(self, rank: int) -> Entry:
        """Wait for what a rank publishes, which has to gather the same."""
        entry, plan = self._entry(rank), self._plan
        if entry.nbytes == NO_MEMORY:
            self._unread, self._is_published = [rank], True
            self.finish()
            raise CommunicationError(
                f"Expected rank {dist.get_global_rank(self._group, rank)} to have {plan.nbytes} "
                "bytes of memory to share with the other ranks of this host, got none"
            )
        if entry.form != plan.digest or (rank != FIRST and entry.nbytes != WRITTEN):
            if not self._is_published:  # what this rank gathers, without writing it
                tell = self._mailbox.tell
                self._publish(partial(tell, self._key, WRITTEN, self._ranks, plan.digest))
            wanted = f"{len(self._outputs)} tensors of {plan.nbytes} bytes in all"
            raise mismatch(self._group, rank, wanted, "others")
        return entry

    def _copy_out(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        outputs, self._outputs = self._outputs, []
        for (number, _), place, out in zip(self._regions, self._plan.outputs, outputs, strict=True):
            if number < 0 or not self._has_slab[number]:
                ctypes.memmove(out.data_ptr(), lease.address + place, out.nbytes)


def _stop_holding(slab: Slab) -> None:
    slab.is_held = False
