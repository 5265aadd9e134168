"""Ranks on one host that read each other's memory.

Linux lets a process copy out of another one of the same user (``process_vm_readv``) and into it,
which costs a fraction of sending the same bytes through a socket.

Whether a process may read another depends on namespaces and on security modules, so ranks try it
once and agree: only pairs that can read each other both ways are neighbours. Each has a letter box
in its memory for every neighbour, into which that one writes.

An offer is an exchange of addresses with every neighbour in a process group. Each rank reads when
it needs the bytes, and then sets a flag in the memory of the owner. Until it is set, the owner must
neither free nor change what it offered. It does not wait for that with every offer, since a rank
that is a little ahead would lose its lead each time, but when a pass ends (:func:`settle`). A rank
that will not read, as its model was thrown away, sets the flag all the same (:func:`_let_go`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.failures import (
    failure_in,
    is_lost,
    lost,
    mismatch,
    refuse_lost,
    watched,
)
from composable_shard.errors import ShardError

# Copying from and to the memory of another process on the same host -------------------------------

LONGEST_COPY = 1 << 30  # bytes; the system calls copy at most 2 GiB at once
_Member = TypeVar("_Member")

SWITCH = "COMPOSABLE_SHARD_READ_NEAR_MEMORY"


class _Span(ctypes.Structure):
    """A piece of an address space, as the system calls want it."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def outlives_interpreter(members: list[_Member]) -> list[_Member]:
    """Return a list whose members are never freed but by taking them out.

    Hazard: another process writes into memory that this one frees while its interpreter ends, and
    the heap is broken. Guard: a reference that nobody gives back. No test: it breaks too rarely.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(members))
    return members


def is_offered() -> bool:
    """Tell whether the system has such calls, and the environment does not forbid their use."""
    return os.environ.get(SWITCH) != "0" and _system_call("process_vm_readv") is not None


def read(process: int, there: int, here: int, nbytes: int) -> None:
    """Copy ``nbytes`` from an address of another process to one of this process.

    Raises:
        ShardError: If the process has ended or has nothing there.
    """
    _copy("process_vm_readv", process, there, here, nbytes)


def write(process: int, there: int, here: int, nbytes: int) -> None:
    """Copy ``nbytes`` to an address of another process from one of this process.

    Raises:
        ShardError: If the process has ended or has nothing there.
    """
    _copy("process_vm_writev", process, there, here, nbytes)


def _copy(name: str, process: int, there: int, here: int, nbytes: int) -> None:
    call, done = _system_call(name), 0
    assert call is not None
    while done < nbytes:
        numel = min(nbytes - done, LONGEST_COPY)
        own, theirs = _Span(here + done, numel), _Span(there + done, numel)
        copied = call(process, own, 1, theirs, 1, 0)
        if copied <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise ShardError(
                f"Expected to copy {nbytes} bytes by {name} with process {process}, got {done} and "
                f"the error '{reason}'; has that rank ended? {SWITCH}=0 on all ranks sends "
                "everything through sockets"
            )
        done += copied


@functools.cache
def _system_call(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True)[name]
    except (OSError, AttributeError):
        return None
    span, count = ctypes.POINTER(_Span), ctypes.c_ulong
    call.argtypes = [ctypes.c_int, span, count, span, count, count]
    call.restype = ctypes.c_ssize_t
    return call


# Ranks on the same host whose memory this one may read, and the letters between them --------------

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
        with watched(group, "finding the ranks of this host"):
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


# Tensors that neighbours read out of this rank's memory, and those that it reads ------------------

_DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]  # by the number that says which one it is
_NUM_YIELDS = 20  # looks before the first nap
_NAPS = 2e-5, 1e-3  # seconds: the shortest and the longest
_NAP_SHARE = 0.1  # of the time already waited
_LONG = 0.05  # seconds after which a rank looks whether the other has ended
_DYING = 1.0  # seconds from the loss of a process's memory to its end, at most
_SET = ctypes.c_uint8(1)

_offers: list[Offer] = outlives_interpreter([])  # those that some neighbour may still read
_abandoned: deque[Offer] = deque()  # those that this rank will not read; see `_let_go`


class Place(NamedTuple):
    """Where a tensor is in the memory of its owner, and what it is made of."""

    address: int
    dtype: torch.dtype


class Offer:
    """One exchange of addresses.

    Hazard: a rank reads tensors, or sets a flag, in memory that their owner has freed. Guard: an
    offer lives until it was read, whatever becomes of the model. Test:
    ``test_an_offer_outlives_its_model``.

    Args:
        group: The process group.
        tag: A number on which the ranks have agreed.
        tensors: What each neighbour may read. All ranks offer tensors of the same numels.

    Raises:
        ShardError: Here and below, if a neighbour has ended, does not do its part within the
            time-out of the process group, or did not so before. The group is lost then.
    """

    def __init__(
        self, group: dist.ProcessGroup, tag: int, tensors: Mapping[int, list[torch.Tensor]]
    ) -> None:
        if _abandoned:
            _let_go()
        _torch.poison_all_when_unused(tensors.values())
        self.tag = tag
        self.is_finished = False
        self.is_abandoned = False
        self._note = _abandoned.append  # kept, as globals may be gone when the interpreter ends
        self.group = group
        self._tensors = tensors
        self._time_out = _torch.timeout_of(group)
        self._neighbours = neighbours(group)
        self._flags = (ctypes.c_uint8 * len(tensors))()
        self._flags_there: dict[int, int] = {}
        self._letters = {peer: self._neighbours[peer].box.expect(tag) for peer in tensors}
        self._tables = []
        _offers.append(self)
        failures = []
        for slot, (peer, members) in enumerate(tensors.items()):
            words = [ctypes.addressof(self._flags) + slot]
            for tensor in members:
                words += [tensor.data_ptr(), _DTYPES.index(tensor.dtype), tensor.numel()]
            table = (ctypes.c_int64 * len(words))(*words)
            self._tables.append(table)
            letter = tag, ctypes.addressof(table), len(words)
            try:
                self._wait(peer, partial(self._neighbours[peer].write, *letter))
            except ShardError as error:  # the others get their letters, and blame the right rank
                failures.append(error)
        for failure in failures:
            raise failure

    def places(self, peer: int, like: Sequence[torch.Tensor] = ()) -> list[Place]:
        """Wait until a neighbour has offered its tensors; return where they are.

        Args:
            peer: The neighbour.
            like: Tensors of the dtypes that are expected; any dtypes if absent.

        Raises:
            RankMismatchError: If they are not as many as this rank offers, or not as long, or of
                other dtypes. What lies behind them in the memory of the neighbour must not be read.
        """
        letter = partial(self._neighbours[peer].box.look, self._letters[peer])
        address, count = self._wait(peer, letter)
        words = (ctypes.c_int64 * count)()
        self._copy(read, peer, address, ctypes.addressof(words), ctypes.sizeof(words))
        self._flags_there[peer], *said = words
        numels, dtypes = said[2::3], [_DTYPES[number] for number in said[1::3]]
        own = [tensor.numel() for tensor in self._tensors[peer]]
        wanted = [tensor.dtype for tensor in like] or dtypes
        if numels != own or dtypes != wanted:
            raise mismatch(
                self.group, peer, f"{own} elements of {wanted}", f"{numels} elements of {dtypes}"
            )
        return list(map(Place, said[::3], dtypes))

    def read(self, peer: int, address: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor from the memory of a neighbour."""
        self._copy(read, peer, address, into.data_ptr(), into.nbytes)

    def finish(self) -> None:
        """Tell the neighbours that this rank has read; let go of what they have read."""
        for peer, flag in self._flags_there.items():
            del self._letters[peer]  # now: after an interrupt only the others are told
            self._copy(write, peer, flag, ctypes.addressof(_SET), 1)
        self._end()

    def abandon(self) -> None:
        """Note that this rank will not read what it has not read by now.

        Hazard: garbage is collected at any time and on any thread, also in the middle of a
        collective. Guard: this takes a note, no more; :func:`_let_go` does the rest. Test:
        ``test_a_reader_may_die_while_a_letter_is_taken``.
        """
        if not self.is_finished:
            self.is_abandoned = True
            self._note(self)

    def let_go(self) -> bool:
        """Tell the neighbours that this rank will not read, without waiting for any of them.

        Returns:
            Whether nothing is left to do. A neighbour whose letter has not come cannot be told yet.
        """
        if is_lost(self.group):  # others may be reading, but they cannot be asked
            return True
        tables = {}
        for peer, letter in self._letters.items():
            content = self._neighbours[peer].box.look(letter)
            if content is None:
                return False
            tables[peer] = content[0]
        for peer, table in tables.items():
            with contextlib.suppress(ShardError):  # it ends, as the next collective finds out
                self._set_flag_of(peer, table)
        self._end()
        return True

    def _set_flag_of(self, peer: int, table: int) -> None:
        neighbour = self._neighbours[peer]
        if neighbour.ends_within(0):  # another process may have its number by now
            return
        flag = ctypes.c_int64()
        read(neighbour.process, table, ctypes.addressof(flag), ctypes.sizeof(flag))
        del self._letters[peer]  # as in `finish`: nobody is told twice
        write(neighbour.process, flag.value, ctypes.addressof(_SET), 1)

    def _end(self) -> None:
        """Let go of all that was read."""
        self.is_finished = True
        for offer in list(_offers):
            if offer.is_finished and offer.was_read:
                _forget(offer)

    @property
    def was_read(self) -> bool:
        """Whether all neighbours have read."""
        return all(self._flags)

    def wait_until_read(self) -> None:
        """Wait until all neighbours have read."""
        for slot, peer in enumerate(self._tensors):
            self._wait(peer, partial(self._flags.__getitem__, slot))

    def _wait(self, peer: int, look: Callable[[], Any]) -> Any:
        """Look until there is something; return it."""
        for _ in range(_NUM_YIELDS):
            if seen := self._look(peer, look):
                return seen
            os.sched_yield()
        refuse_lost(self.group)
        neighbour, start = self._neighbours[peer], time.monotonic()
        last = now = start
        shortest, longest = _NAPS
        while True:
            time.sleep(min(longest, max(shortest, _NAP_SHARE * (now - start))))
            now, got = time.monotonic(), None
            if now - last > _LONG:
                last = now
                failure = failure_in(self.group)
                if failure is not None:
                    got = f"word that {failure}"
                elif neighbour.ends_within(0):
                    got = f"the end of its process {neighbour.process}"
                elif now - start > self._time_out:
                    got = f"no sign of it within the time-out of {self._time_out:.0f} s"
            if seen := self._look(peer, look):  # also what was there when it ended
                return seen
            if got is not None:
                raise lost(self.group, peer, got)

    def _copy(self, call: Callable[..., None], peer: int, *places: int) -> None:
        """Read from a neighbour or write to it."""
        self._look(peer, partial(call, self._neighbours[peer].process, *places))

    def _look(self, peer: int, look: Callable[[], Any]) -> Any:
        """Call what reads from a neighbour or writes to it."""
        try:
            return look()
        except ShardError as error:
            neighbour = self._neighbours[peer]
            ended = neighbour.ends_within(_DYING)
            got = f"the end of its process {neighbour.process}" if ended else error
            raise lost(self.group, peer, got) from error


def settle(ops: Mapping[int, str]) -> None:
    """Wait until neighbours have read what this rank has offered.

    Only finished exchanges count, and those of others are left alone: a rank that drops a model
    may never read what others have offered for it. What was offered to a process group that is
    lost lives on: somebody may still read it.

    Args:
        ops: Under which tags it was offered, and for what, for messages.

    Hazard: an optimizer changes shards that another rank is reading. Guard: every pass ends with
    this, before code of the user's runs. Test: ``test_nothing_is_read_when_a_pass_has_ended``.
    """
    if _abandoned:
        _let_go()
    for offer in [offer for offer in _offers if offer.is_finished and offer.tag in ops]:
        if offer.is_abandoned or is_lost(offer.group):
            continue
        with watched(offer.group, f"others were {ops[offer.tag]}"):
            offer.wait_until_read()
        _forget(offer)


def _let_go() -> None:
    """Tell neighbours what this rank will not read, as far as that is possible without waiting.

    Hazard: an offer that nobody reads lives for ever, and a model with it. Guard: this, at the
    beginning of every exchange and at the end of every pass. Test:
    ``test_what_nobody_reads_is_freed``.
    """
    for _ in range(len(_abandoned)):
        try:
            offer = _abandoned.popleft()
        except IndexError:  # another thread was quicker
            return
        is_done = False
        try:
            is_done = offer.let_go()
        finally:  # also after an interrupt
            if not is_done:
                _abandoned.append(offer)


def _forget(offer: Offer) -> None:
    """Remove an offer from the list.

    Hazard: another thread adds one meanwhile, which is lost, and freed while others read it. Guard:
    the list is not replaced. Test: ``test_the_list_of_offers_is_never_replaced``.
    """
    with contextlib.suppress(ValueError):  # another thread was quicker
        _offers.remove(offer)
