"""Ranks on the same host whose memory this one may read, and the letters between them.

Whether a process may read another depends on namespaces and on security modules, so ranks try it
once and agree: only pairs that can read each other both ways are neighbours. Each has a letter box
in its memory for every neighbour, into which that one writes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import threading
import weakref
from typing import TypeVar

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.comms.near_memory import (
    is_offered,
    outlives_interpreter,
    read,
    write,
)
from composable_shard.errors import ShardError

NUM_LETTERS = 512  # a box holds so many that were not taken out
_WORDS = 3  # of a letter: its tag, an address, a count
_WORD = 8  # bytes
_NUM_SECRETS = 4  # 32 bytes that no other process has at the same address by chance

_neighbours: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Neighbour]]
_neighbours = weakref.WeakKeyDictionary()
_boxes: list[LetterBox] = outlives_interpreter([])
_Queued = TypeVar("_Queued")


class Letter:
    """A letter that is to come.

    Attributes:
        content: An address and a count; ``None`` until it has come.
    """

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: tuple[int, int] | None = None


class LetterBox:
    """A ring of letters in this process's memory, into which one other process writes.

    The first word counts letters that were written, by the writer; the second those that were taken
    out, by the owner. Letters of a tag are for those who expect one, first come, first served.

    Hazard: a letter is written into memory that was freed. Guard: boxes are never freed.

    Hazard: nobody waits for a gather, and the next one takes its letter. Guard: that letter is
    expected, not looked for. Test: ``test_the_next_one_does_not_read_what_was_for_nobody``.

    Hazard: two threads take the same letter. Guard: a lock.
    """

    def __init__(self) -> None:
        self._memory = (ctypes.c_int64 * (2 + NUM_LETTERS * _WORDS))()
        self._lock = threading.Lock()
        self._expected: dict[int, list[Letter]] = {}  # by tag
        self._early: dict[int, list[tuple[int, int]]] = {}  # that nobody expects yet
        self.address = ctypes.addressof(self._memory)
        _boxes.append(self)

    def expect(self, tag: int) -> Letter:
        """Return the letter of that tag which is to come after all that are expected already."""
        letter = Letter()
        with self._lock:
            letter.content = _first(self._early, tag)
            if letter.content is None:
                self._expected.setdefault(tag, []).append(letter)
        return letter

    def look(self, letter: Letter) -> tuple[int, int] | None:
        """Return the content of a letter if it has come."""
        if letter.content is None:
            with self._lock:
                self._hand_out()
        return letter.content

    def _hand_out(self) -> None:
        memory = self._memory
        while memory[1] < memory[0]:
            start = 2 + memory[1] % NUM_LETTERS * _WORDS
            tag, *content = memory[start : start + _WORDS]
            memory[1] += 1  # first: an interrupt may lose a letter, but not hand it out twice
            letter = _first(self._expected, tag)
            if letter is None:
                self._early.setdefault(tag, []).append((content[0], content[1]))
            else:
                letter.content = content[0], content[1]


def _first(queues: dict[int, list[_Queued]], tag: int) -> _Queued | None:
    """Take the first of the queue of that tag; leave no empty queue."""
    queue = queues.get(tag)
    first = queue.pop(0) if queue else None
    if not queue:
        queues.pop(tag, None)
    return first


class Neighbour:
    """A rank whose memory this one reads.

    Attributes:
        rank: Which one, in the process group.
        process: Its process.
        box: Where its letters arrive.
    """

    def __init__(self, rank: int, process: int, box: LetterBox, its_box: int) -> None:
        self.rank = rank
        self.process = process
        self.box = box
        self._its_box = its_box
        self._num_written = 0
        self._num_taken = 0
        self._process_end = os.pidfd_open(process)
        weakref.finalize(self, os.close, self._process_end)

    def write(self, tag: int, address: int, count: int) -> bool:
        """Put a letter into this rank's box at the neighbour; ``False`` if the box is full."""
        if self._num_written - self._num_taken >= NUM_LETTERS:
            taken = ctypes.c_int64()
            read(self.process, self._its_box + _WORD, ctypes.addressof(taken), _WORD)
            self._num_taken = taken.value
            if self._num_written - self._num_taken >= NUM_LETTERS:
                return False
        letter = (ctypes.c_int64 * _WORDS)(tag, address, count)
        place = self._its_box + (2 + self._num_written % NUM_LETTERS * _WORDS) * _WORD
        write(self.process, place, ctypes.addressof(letter), _WORDS * _WORD)
        self._num_written += 1
        count_written = ctypes.c_int64(self._num_written)
        write(self.process, self._its_box, ctypes.addressof(count_written), _WORD)
        return True

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of its process; tell whether it came."""
        poll = select.poll()
        poll.register(self._process_end, select.POLLIN)
        return bool(poll.poll(1000 * seconds))


def neighbours(group: dist.ProcessGroup) -> dict[int, Neighbour]:
    """Return the neighbours among the ranks of ``group``, by rank.

    Args:
        group: A process group that sends tensors of the CPU.

    Collective: two all-gathers of a few bytes at the first call for ``group``.
    """
    found = _neighbours.get(group)
    if found is None:
        found = _neighbours[group] = _try_all(group)
    return found


def _try_all(group: dist.ProcessGroup) -> dict[int, Neighbour]:
    """Let every rank read a secret of every other; keep the pairs where both found the right one.

    Hazard: a process of the same number on another host, or in another container. Guard: it does
    not have this secret. Test: ``test_a_process_that_does_not_know_the_secret_is_no_neighbour``.
    """
    rank, num_ranks = group.rank(), group.size()
    secret = torch.tensor([secrets.randbits(63) for _ in range(_NUM_SECRETS)])
    boxes = [LetterBox() for _ in range(num_ranks)]
    own = [os.getpid(), secret.data_ptr(), *secret.tolist(), *(box.address for box in boxes)]
    cards = _torch.empty(num_ranks, len(own), dtype=torch.int64, device="cpu")
    _torch.all_gather_rows(cards, torch.tensor(own), group)
    found = [peer != rank and _knows(cards[peer].tolist()) for peer in range(num_ranks)]
    pairs = _torch.empty(num_ranks, num_ranks, dtype=torch.uint8, device="cpu")
    _torch.all_gather_rows(pairs, torch.tensor(found).to(torch.uint8), group)
    both = (pairs * pairs.t())[rank].tolist()
    its_boxes = cards[:, 2 + _NUM_SECRETS + rank].tolist()
    return {
        peer: Neighbour(peer, int(cards[peer, 0]), boxes[peer], its_boxes[peer])
        for peer in range(num_ranks)
        if both[peer]
    }


def _knows(card: list[int]) -> bool:
    """Tell whether the process that a card names has the secret that it tells."""
    if not is_offered() or not hasattr(os, "pidfd_open"):
        return False
    process, address, *secret = card[: 2 + _NUM_SECRETS]
    seen = (ctypes.c_int64 * _NUM_SECRETS)()
    try:
        read(process, address, ctypes.addressof(seen), _NUM_SECRETS * _WORD)
        os.close(os.pidfd_open(process))
    except (ShardError, OSError):
        return False
    return list(seen) == secret
