"""Messages that ranks of one host publish for each other in shared memory.

To publish a message, a rank copies tensors into a slab of its own memory and appends an entry to
its ring buffer. Each of the other ranks reads the slab when it needs the values, or maps its pages,
as the rank itself may do. A rank that has read or unmapped it acknowledges the message in a slot, a
word in its own memory. After all acknowledgements, the slab is free again. A message is a copy, so
its source may be changed or freed at once.

An entry names its collective: the tag, which the ranks have agreed on, and the number among the
collectives of this tag. So no collective reads a message of an interrupted one. A rank that gives
up a collective before it has published appends an entry without a slab.

Each rank writes only its own memory. The control words in the memory of a rank are:

- the number of entries that it has published;
- for each other rank, the number of entries of that rank that this rank has read;
- the ring buffer of entries;
- for each other rank, the slots in which this rank acknowledges messages of that rank.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.background import call_periodically, ensure_thread
from composable_shard.core.transport.failures import watched
from composable_shard.core.transport.gloo.shared_memory import (
    SWITCH,
    OwnFile,
    PeerFile,
    Shared,
    Slab,
    share,
)
from composable_shard.errors import ShardError

NUM_ENTRIES = 256  # in the ring buffer
NUM_SLOTS = 1 << 14  # one for each unacknowledged message of a rank
# The number of words of an entry: its number, the tag and the number of its collective (a `Key`),
# the slot of its acknowledgements, and the start and nbytes of its slab.
_ENTRY_WORDS = 6
GIVEN_UP = -1  # the nbytes of an entry without a slab

_log = logging.getLogger("composable_shard")
_fence = threading.Lock()

Key = tuple[int, int]  # a tag, and the number of the collective among those of the tag


def _memory_barrier() -> None:
    """Act as a memory barrier for this thread.

    Hazard: on processors other than x86, a control word may become visible before the memory that
    it announces. Guard: a release and an acquire of a lock. There is no test, since it would need
    such a processor, and luck.
    """
    with _fence:
        pass
    with _fence:
        pass


class Entry(NamedTuple):
    """An entry that a rank has published.

    Attributes:
        number: Its number, from 1.
        slot: The slot in which each reader acknowledges it.
        start: The start of the slab in the file of that rank.
        nbytes: The size of the slab; :data:`GIVEN_UP` if there is none.
    """

    number: int
    slot: int
    start: int
    nbytes: int


class Peer:
    """Another rank of the process group; this rank reads its memory.

    Attributes:
        rank: The rank.
        file: The file with its memory.
        words: Its control words.
        num_entries_taken: The number of entries that this rank has taken from the ring buffer of
            the peer.
        to_acknowledge: The entries taken, with messages that this rank has not acknowledged yet.
        unwanted: The keys of future messages that this rank will not need.
    """

    def __init__(self, rank: int, file: PeerFile) -> None:
        self.rank = rank
        self.file = file
        self.words = file.words
        self.num_entries_taken = 0
        self.to_acknowledge: dict[Key, Entry] = {}
        self.unwanted: set[Key] = set()


class Mailbox:
    """The messages that this rank publishes and reads in one process group.

    Hazard: two threads read the same entry. Guard: a lock.

    Hazard: a forked process writes to the memory of its parent. Guard: every access raises an error
    in a forked process. Test:
    ``test_a_forked_process_does_not_write_to_memory_of_its_parent``.

    Args:
        group: The process group.
        shared: The memory that its ranks share.

    Attributes:
        peers: The ranks that share memory with this one.
    """

    def __init__(self, group: dist.ProcessGroup, shared: Shared) -> None:
        assert shared.own is not None
        self.peers = {rank: Peer(rank, shared.files[rank]) for rank in sorted(shared.files)}
        self._own: OwnFile = shared.own
        self._words = shared.own.words
        self._rank, self._num_ranks = group.rank(), group.size()
        self._slots_start = 1 + self._num_ranks + NUM_ENTRIES * _ENTRY_WORDS
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._counts: dict[int, int] = {}  # of collectives, by tag
        self._num_published = 0
        self._free_slots: list[int] = []
        self._num_slots = 0  # the number of slots ever used
        self._published: list[_Published] = []
        # For each collective given up: the key, the ranks with messages to acknowledge, and whether
        # this rank has published. Any thread may append.
        self.given_up: deque[tuple[Key, list[int], bool]] = deque()

    @staticmethod
    def num_words(num_ranks: int) -> int:
        """Return the number of control words of each rank of a group."""
        return 1 + num_ranks + NUM_ENTRIES * _ENTRY_WORDS + num_ranks * NUM_SLOTS

    def next_key(self, tag: int) -> Key:
        """Begin a collective of a tag; return its key."""
        with self._lock:
            count = self._counts[tag] = self._counts.get(tag, -1) + 1
        return tag, count

    def publish(self, key: Key, slab: Slab, ranks: Sequence[int]) -> bool:
        """Publish a slab; return ``False`` if no entry or no slot is free.

        Args:
            key: The collective.
            slab: The message.
            ranks: The ranks that will read it: all other ranks that share memory.
        """
        with self._lock:
            if not self.has_room(ranks):
                return False
            if not self._free_slots:
                self._reclaim_slabs()
            if not self._free_slots:
                if self._num_slots == NUM_SLOTS:
                    return False
                self._free_slots.append(self._num_slots)
                self._num_slots += 1
            slot = heappop(self._free_slots)
            self._published.append(_Published(self._num_published + 1, slot, slab, list(ranks)))
            self._append_entry(key, slot, slab.start, slab.nbytes)
        return True

    def allocate_slab(self, nbytes: int) -> Slab:
        """Return a free slab to fill and publish."""
        with self._lock:
            self._reclaim_slabs()
            return self._own.allocate(nbytes)

    def find_entry(self, peer: Peer, key: Key) -> Entry | None:
        """Return a peer's entry for a collective; ``None`` if the peer has not published it."""
        self.refuse_fork()
        entry = peer.to_acknowledge.get(key)
        if entry is None:
            self.read_entries(peer)
            entry = peer.to_acknowledge.get(key)
        return entry

    def read_entries(self, peer: Peer) -> None:
        """Read the entries that a peer has published."""
        words, index_of_num_read = peer.words, 1 + peer.rank
        count = words[0]
        if count == peer.num_entries_taken:
            return
        with self._lock:
            _memory_barrier()
            ring = 1 + self._num_ranks
            while peer.num_entries_taken < count:
                start = ring + peer.num_entries_taken % NUM_ENTRIES * _ENTRY_WORDS
                number, tag, count_of_tag, *rest = words[start : start + _ENTRY_WORDS]
                self._add_entry(peer, (tag, count_of_tag), Entry(number, *rest))
                peer.num_entries_taken += 1
            _memory_barrier()
            self._words[index_of_num_read] = peer.num_entries_taken

    def acknowledge(self, key: Key, ranks: list[int]) -> None:
        """Acknowledge the messages of a collective.

        Args:
            key: The collective.
            ranks: The ranks that sent them; each is removed once its message is acknowledged.
        """
        with self._lock:
            _memory_barrier()
            while ranks:
                peer = self.peers[ranks[-1]]
                entry = peer.to_acknowledge.get(key)
                if entry is None:
                    peer.unwanted.add(key)
                else:
                    self._acknowledge_entry(peer, entry)
                    del peer.to_acknowledge[key]
                ranks.pop()

    def catch_up(self) -> None:
        """Read all entries, and process the collectives that this rank has given up."""
        self.read_all_entries()
        self.process_given_up()

    def read_all_entries(self) -> None:
        """Read the entries of all peers.

        Hazard: a rank that needs no messages reads no entries, and the ring buffers of its peers
        fill up. Guard: this call, at the start of every collective and periodically on the
        background thread. Test: ``test_a_rank_that_gets_nothing_still_reads_entries``.
        """
        self.refuse_fork()
        for peer in self.peers.values():
            self.read_entries(peer)

    def process_given_up(self) -> None:
        """Finish the collectives that this rank has given up.

        Acknowledge the messages of other ranks, and append an entry without a slab, which ends the
        waits of readers.

        Hazard: the garbage collector may delete an exchange on any thread, also while the lock is
        held. Guard: a deleted exchange only appends to ``given_up``, and this call does the rest.
        Test: ``test_an_exchange_may_be_deleted_while_the_lock_is_held``.
        """
        while self.given_up:
            with self._lock:
                try:
                    key, ranks, is_published = self.given_up[0]
                except IndexError:  # another thread was faster
                    return
                if not is_published and not self.has_room(self.peers):
                    return  # try again the next time
                self.acknowledge(key, ranks)
                if not is_published:
                    self._append_entry(key, -1, 0, GIVEN_UP)
                self.given_up.popleft()

    def _add_entry(self, peer: Peer, key: Key, entry: Entry) -> None:
        if key in peer.unwanted:
            peer.unwanted.discard(key)
            self._acknowledge_entry(peer, entry)
        # A rank that is interrupted right after it has published also appends an entry without a
        # slab: ignore that entry, and keep the message.
        elif entry.nbytes != GIVEN_UP or key not in peer.to_acknowledge:
            peer.to_acknowledge[key] = entry

    def _acknowledge_entry(self, peer: Peer, entry: Entry) -> None:
        if entry.nbytes >= 0:
            self._words[self._slots_start + peer.rank * NUM_SLOTS + entry.slot] = entry.number

    def _reclaim_slabs(self) -> None:
        """Free the slabs that no rank uses any more."""
        first_slot, peers = self._slots_start + self._rank * NUM_SLOTS, self.peers
        for published in list(self._published):
            index, number, ranks = first_slot + published.slot, published.number, published.ranks
            while ranks and peers[ranks[-1]].words[index] == number:
                ranks.pop()
            if not published.ranks and not published.slab.is_held:
                _memory_barrier()
                self._published.remove(published)
                self._own.free(published.slab)
                heappush(self._free_slots, published.slot)

    def poll_room(self, ranks: Iterable[int]) -> bool:
        """Read all entries, because other ranks may wait for that; then return :meth:`has_room`."""
        self.read_all_entries()
        return self.has_room(ranks)

    def has_room(self, ranks: Iterable[int]) -> bool:
        """Return whether the ranks have read the entry that the next entry overwrites."""
        index, required = 1 + self._rank, self._num_published + 1 - NUM_ENTRIES
        return required <= 0 or all(self.peers[rank].words[index] >= required for rank in ranks)

    def _append_entry(self, key: Key, slot: int, start: int, nbytes: int) -> None:
        number = self._num_published + 1
        first_word = 1 + self._num_ranks + self._num_published % NUM_ENTRIES * _ENTRY_WORDS
        for offset, word in enumerate((number, *key, slot, start, nbytes)):
            self._words[first_word + offset] = word
        _memory_barrier()
        self._num_published = self._words[0] = number

    def refuse_fork(self) -> None:
        """Raise an error in a process that was forked from the owner of this mailbox."""
        if os.getpid() != self._process:
            raise ShardError(
                "Expected a process group in the process that made it, got it in a forked child; "
                "start the ranks first, and make a process group in each"
            )


@dataclass(eq=False)
class _Published:
    """A message that some of its ``ranks`` have not acknowledged yet."""

    number: int
    slot: int
    slab: Slab
    ranks: list[int]


# The mailboxes of this process --------------------------------------------------------------------

_mailboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox | None]
_mailboxes = weakref.WeakKeyDictionary()
_reasons_not_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]]
_reasons_not_shared = weakref.WeakKeyDictionary()
_is_warned = False

call_periodically(_torch.unmap_unused)


def mailbox_of(group: dist.ProcessGroup) -> Mailbox | None:
    """Return the mailbox of this rank in ``group``; ``None`` if it shares memory with no rank.

    Args:
        group: A process group that sends tensors of the CPU.

    Collective: two all-gathers of a few bytes at the first call for ``group``.
    """
    if group not in _mailboxes:
        with watched(group, "finding the ranks of this host"):
            shared = share(group, Mailbox.num_words(group.size()))
        _reasons_not_shared[group] = shared.reasons
        _mailboxes[group] = mailbox = Mailbox(group, shared) if shared.files else None
        if mailbox is not None:
            call_periodically(mailbox.read_all_entries)
            ensure_thread()
        _log_peers(group, shared)
    return _mailboxes[group]


def local_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks within ``group`` that share memory with this one.

    Collective: see :func:`mailbox_of`.
    """
    mailbox = mailbox_of(group)
    return [] if mailbox is None else list(mailbox.peers)


def why_not_shared(group: dist.ProcessGroup) -> dict[int, str]:
    """Return the reasons why other ranks of ``group`` share no memory with this one, by rank.

    Collective: see :func:`mailbox_of`.
    """
    mailbox_of(group)
    return _reasons_not_shared[group]


def _log_peers(group: dist.ProcessGroup, shared: Shared) -> None:
    """Log how this rank communicates with each other rank; warn once about a slow pair."""
    ranks = dist.get_process_group_ranks(group)
    rank, name = ranks[group.rank()], group.group_name
    if shared.files:
        near = ", ".join(str(ranks[peer]) for peer in sorted(shared.files))
        _log.info("process group %s: rank %d shares memory with rank %s", name, rank, near)
    for peer, reason in shared.reasons.items():
        _log.info(
            "process group %s: rank %d and rank %d use sockets, because %s",
            *(name, rank, ranks[peer], reason),
        )
    global _is_warned
    slow = [peer for peer in shared.on_this_host if peer in shared.reasons]
    if slow and not _is_warned and os.environ.get(SWITCH) != "0":
        _is_warned = True
        warnings.warn(
            f"Rank {rank} and rank {ranks[slow[0]]} run on one host and share no memory, because "
            f"{shared.reasons[slow[0]]}; they send messages through sockets, which is slower",
            stacklevel=2,
        )
