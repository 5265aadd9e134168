"""Tensors that ranks of one host publish for each other in shared memory, and read.

A rank publishes a message: it copies its tensors into a slab of its own memory and writes an entry
behind those it has written before. Each of the others reads the slab when it needs the values, and
says so with a word in its own memory. Then the slab is free again.
What was published is a copy: its source may change or go at once, and whatever becomes of a model
or of a rank, what others read stays as it was.

Which entry is for which collective is told by its tag, on which the ranks have agreed, and by its
number among those of that tag. So an interrupt in the middle of one never makes the next one read
what was meant for it. A rank that gives one up before it has published says that, too.

Everybody writes his own memory alone. The words of control are, in the memory of each rank:

- how many entries it has published;
- for each rank, how many of that one's entries it has taken note of;
- the entries, in a ring;
- for each rank, which of that one's messages it has read (acknowledgements).
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

from composable_shard.core.transport.beside import do_beside, ensure_thread
from composable_shard.core.transport.failures import watched
from composable_shard.core.transport.gloo.shared_memory import (
    SWITCH,
    OwnFile,
    PeerFile,
    Shared,
    Slab,
    has_ended,
    share,
)
from composable_shard.errors import ShardError

NUM_ENTRIES = 256  # of the ring
NUM_ACKS = 1 << 14  # messages to a rank that it may leave unread
_ENTRY = 6  # words: its number, tag, number of its tag, place of the acknowledgement, start, nbytes
GIVEN_UP = -1  # in the place of nbytes

_log = logging.getLogger("composable_shard")
_fence = threading.Lock()

Key = tuple[int, int]  # a tag, and which of its collectives


def _order_memory() -> None:
    """Keep what this thread has done to memory before apart from what it does after.

    Hazard: a processor that is not an x86 shows others a word before what it stands for. Guard:
    atomic operations, one that releases and one that acquires behind it. No test: it takes such a
    processor, and luck.
    """
    with _fence:
        pass
    with _fence:
        pass


class Entry(NamedTuple):
    """What a rank has published.

    Attributes:
        number: Of the entry, from 1.
        ack: Where to say that it was read.
        start: Of the slab in the file of that rank.
        nbytes: Of the slab; :data:`GIVEN_UP` if there is none.
    """

    number: int
    ack: int
    start: int
    nbytes: int


class Peer:
    """Another rank of the process group, whose memory this one reads.

    Attributes:
        rank: Which one.
        words: Its words of control.
        num_taken: How many of its entries were taken note of.
        arrived: Those that this rank has not read.
        unwanted: What this rank is not going to read, and has not arrived.
    """

    def __init__(self, rank: int, file: PeerFile, end: int) -> None:
        self.rank = rank
        self.file = file
        self.words = file.words
        self.num_taken = 0
        self.arrived: dict[Key, Entry] = {}
        self.unwanted: set[Key] = set()
        self._end = end

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of its process; tell whether it came."""
        return has_ended(self._end, seconds)


class Mailbox:
    """What this rank publishes in one process group, and what it reads there.

    Hazard: two threads take note of the same entry. Guard: a lock.

    Hazard: a forked process writes for its parent, or into what that one has taken since. Guard: it
    is refused before it takes, writes or returns anything. Test:
    ``test_a_forked_process_writes_nowhere_that_its_parent_has_taken_since``.

    Args:
        group: The process group.
        shared: The memory that its ranks share.

    Attributes:
        peers: By rank, those whose memory this rank reads, and which read its own.
    """

    def __init__(self, group: dist.ProcessGroup, shared: Shared) -> None:
        assert shared.own is not None
        self.peers = {
            rank: Peer(rank, shared.files[rank], shared.ends[rank]) for rank in sorted(shared.files)
        }
        self._own: OwnFile = shared.own
        self._words = shared.own.words
        self._rank, self._num_ranks = group.rank(), group.size()
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._counts: dict[int, int] = {}  # of collectives, by tag
        self._num_published = 0
        self._free_acks: list[int] = []
        self._num_acks = 0  # that were ever used
        self._unread: list[_Published] = []
        self.given_up: deque[tuple[Key, list[int], bool]] = deque()  # appended to by any thread

    @staticmethod
    def num_words(num_ranks: int) -> int:
        """Return how many words of control each rank of a group has."""
        return 1 + num_ranks + NUM_ENTRIES * _ENTRY + num_ranks * NUM_ACKS

    def next_key(self, tag: int) -> Key:
        """Begin a collective of that tag."""
        with self._lock:
            count = self._counts[tag] = self._counts.get(tag, -1) + 1
        return tag, count

    def publish(self, key: Key, slab: Slab, ranks: Sequence[int]) -> bool:
        """Show a slab to some ranks; ``False`` if it has to wait until they take note of others.

        Args:
            key: Of the collective.
            slab: What to show.
            ranks: Them.
        """
        with self._lock:
            if not self.has_room(ranks):
                return False
            if not self._free_acks:
                self._take_back()
            if not self._free_acks:
                if self._num_acks == NUM_ACKS:
                    return False
                self._free_acks.append(self._num_acks)
                self._num_acks += 1
            ack = heappop(self._free_acks)
            self._unread.append(_Published(self._num_published + 1, ack, slab, list(ranks)))
            self._write(key, ack, slab.start, slab.nbytes)
        return True

    def take_slab(self, nbytes: int) -> Slab:
        """Return a slab to publish."""
        with self._lock:
            self._take_back()
            return self._own.take(nbytes)

    def look(self, peer: Peer, key: Key) -> Entry | None:
        """Return what a peer has published for a collective, if it has."""
        self.refuse_fork()
        entry = peer.arrived.get(key)
        if entry is None:
            self.take_note(peer)
            entry = peer.arrived.get(key)
        return entry

    def take_note(self, peer: Peer) -> None:
        """Take note of what a peer has published."""
        words, own_place = peer.words, 1 + peer.rank
        count = words[0]
        if count == peer.num_taken:
            return
        with self._lock:
            _order_memory()
            ring = 1 + self._num_ranks
            while peer.num_taken < count:
                start = ring + peer.num_taken % NUM_ENTRIES * _ENTRY
                number, tag, index, *rest = words[start : start + _ENTRY]
                self._arrive(peer, (tag, index), Entry(number, *rest))
                peer.num_taken += 1
            _order_memory()
            self._words[own_place] = peer.num_taken

    def has_read(self, key: Key, ranks: list[int]) -> None:
        """Tell others that this rank has what they published, and needs it no more.

        Args:
            key: Of the collective.
            ranks: Them; each is taken away once it is told.
        """
        with self._lock:
            _order_memory()
            while ranks:
                peer = self.peers[ranks[-1]]
                entry = peer.arrived.get(key)
                if entry is None:
                    peer.unwanted.add(key)
                else:
                    self._acknowledge(peer, entry)
                    del peer.arrived[key]
                ranks.pop()

    def go_on(self) -> None:
        """Do what others may wait for, and say what this rank uses no more."""
        self.catch_up()
        self.let_go()

    def catch_up(self) -> None:
        """Take note of what others say, which they may wait for.

        Hazard: this rank gets nothing of what they gather, so that it never looks. Guard: it looks
        whenever it begins something, and now and then on a thread beside. Test:
        ``test_a_rank_that_gets_nothing_takes_note``.
        """
        self.refuse_fork()
        for peer in self.peers.values():
            self.take_note(peer)

    def let_go(self) -> None:
        """Say which collectives this rank has given up, and which slabs it uses no more.

        Hazard: garbage is collected at any time and on any thread, also while the lock is held.
        Guard: an exchange that goes leaves a note, and this does the rest. Test:
        ``test_an_exchange_may_go_while_the_lock_is_held``.
        """
        while self.given_up:
            with self._lock:
                try:
                    key, ranks, is_published = self.given_up[0]
                except IndexError:  # another thread was quicker
                    return
                if not is_published and not self.has_room(self.peers):
                    return  # the next time
                self.has_read(key, ranks)
                if not is_published:
                    self._write(key, -1, 0, GIVEN_UP)
                self.given_up.popleft()

    @property
    def num_unread(self) -> int:
        """How many messages somebody has still to read, or to use."""
        self.let_go()
        with self._lock:
            self._take_back()
            return len(self._unread)

    def _arrive(self, peer: Peer, key: Key, entry: Entry) -> None:
        if key in peer.unwanted:
            peer.unwanted.discard(key)
            self._acknowledge(peer, entry)  # nothing of it was read
        elif entry.nbytes != GIVEN_UP or key not in peer.arrived:
            peer.arrived[key] = entry

    def _acknowledge(self, peer: Peer, entry: Entry) -> None:
        if entry.nbytes >= 0:
            acks = 1 + self._num_ranks + NUM_ENTRIES * _ENTRY
            self._words[acks + peer.rank * NUM_ACKS + entry.ack] = entry.number

    def _take_back(self) -> None:
        """Take back the slabs that all have read."""
        acks, peers = 1 + self._num_ranks + NUM_ENTRIES * _ENTRY + self._rank * NUM_ACKS, self.peers
        for published in list(self._unread):
            place, number, ranks = acks + published.ack, published.number, published.ranks
            while ranks and peers[ranks[-1]].words[place] == number:
                ranks.pop()
            if not published.ranks:
                _order_memory()
                self._unread.remove(published)
                self._own.give_back(published.slab)
                heappush(self._free_acks, published.ack)

    def make_room(self, ranks: Iterable[int]) -> bool:
        """Take note of what others say, who may wait likewise; see :meth:`has_room`."""
        self.catch_up()
        return self.has_room(ranks)

    def has_room(self, ranks: Iterable[int]) -> bool:
        """Tell whether some ranks have taken note of what the next entry overwrites."""
        place, most = 1 + self._rank, self._num_published - NUM_ENTRIES
        return most < 0 or all(self.peers[rank].words[place] > most for rank in ranks)

    def _write(self, key: Key, ack: int, start: int, nbytes: int) -> None:
        number = self._num_published + 1
        place = 1 + self._num_ranks + self._num_published % NUM_ENTRIES * _ENTRY
        for offset, word in enumerate((number, *key, ack, start, nbytes)):
            self._words[place + offset] = word
        _order_memory()
        self._num_published = self._words[0] = number

    def refuse_fork(self) -> None:
        """Raise an error in a process that was forked from the one that this belongs to."""
        if os.getpid() != self._process:
            raise ShardError(
                "Expected the process that made a process group to use it, got one that was forked "
                "from it; start the ranks before, or make a process group in each"
            )


@dataclass(eq=False)
class _Published:
    """A message that some ranks have still to read."""

    number: int
    ack: int
    slab: Slab
    ranks: list[int]


# The mailboxes of this process --------------------------------------------------------------------

_mailboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox | None]
_mailboxes = weakref.WeakKeyDictionary()
_reasons: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]]
_reasons = weakref.WeakKeyDictionary()
_is_warned = False


def mailbox_of(group: dist.ProcessGroup) -> Mailbox | None:
    """Return what this rank shares with others of ``group``; ``None`` if it is with nobody.

    Args:
        group: A process group that sends tensors of the CPU.

    Collective: three all-gathers of a few bytes at the first call for ``group``.
    """
    if group not in _mailboxes:
        with watched(group, "finding the ranks of this host"):
            shared = share(group, Mailbox.num_words(group.size()))
        _reasons[group] = shared.reasons
        _mailboxes[group] = box = Mailbox(group, shared) if shared.files else None
        if box is not None:
            do_beside(box.catch_up)
            ensure_thread()
        _tell(group, shared)
    return _mailboxes[group]


def near_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks within ``group`` with which this one shares memory. Collective: once."""
    mailbox = mailbox_of(group)
    return [] if mailbox is None else list(mailbox.peers)


def why_apart(group: dist.ProcessGroup) -> dict[int, str]:
    """Return why this rank shares no memory with others of ``group``, by their ranks."""
    mailbox_of(group)
    return _reasons[group]


def _tell(group: dist.ProcessGroup, shared: Shared) -> None:
    """Log how this rank talks to each other one; warn once of what could be faster."""
    ranks = dist.get_process_group_ranks(group)
    rank, name = ranks[group.rank()], group.group_name
    if shared.files:
        near = ", ".join(str(ranks[peer]) for peer in sorted(shared.files))
        _log.info("process group %s: rank %d shares memory with rank %s", name, rank, near)
    for peer, reason in shared.reasons.items():
        _log.info(
            "process group %s: rank %d and rank %d exchange messages, because %s",
            *(name, rank, ranks[peer], reason),
        )
    global _is_warned
    slow = [peer for peer in shared.on_this_host if peer in shared.reasons]
    if slow and not _is_warned and os.environ.get(SWITCH) != "0":
        _is_warned = True
        warnings.warn(
            f"Rank {rank} and rank {ranks[slow[0]]} run on one host and share no memory, because "
            f"{shared.reasons[slow[0]]}; what they send goes through sockets, which is slower",
            stacklevel=2,
        )
