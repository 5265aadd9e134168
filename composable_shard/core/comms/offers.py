"""Tensors that neighbours read out of this rank's memory, and those that it reads.

An offer is an exchange of addresses with every neighbour in a process group. Each rank reads when
it needs the bytes, and then sets a flag in the memory of the owner. Until it is set, the owner must
neither free nor change what it offered. It does not wait for that with every offer, since a rank
that is a little ahead would lose its lead each time, but when a pass ends (:func:`settle`). A rank
that will not read, as its model was thrown away, sets the flag all the same (:func:`_let_go`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.comms.failures import (
    failure_in,
    is_lost,
    lost,
    mismatch,
    refuse_lost,
    watched,
)
from composable_shard.core.comms.near_memory import outlives_interpreter, read, write
from composable_shard.core.comms.neighbours import neighbours
from composable_shard.errors import ShardError

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


def settle(acts: Mapping[int, str]) -> None:
    """Wait until neighbours have read what this rank has offered.

    Only finished exchanges count, and those of others are left alone: a rank that drops a model
    may never read what others have offered for it. What was offered to a process group that is
    lost lives on: somebody may still read it.

    Args:
        acts: Under which tags it was offered, and for what, for messages.

    Hazard: an optimizer changes shards that another rank is reading. Guard: every pass ends with
    this, before code of the user's runs. Test: ``test_nothing_is_read_when_a_pass_has_ended``.
    """
    if _abandoned:
        _let_go()
    for offer in [offer for offer in _offers if offer.is_finished and offer.tag in acts]:
        if offer.is_abandoned or is_lost(offer.group):
            continue
        with watched(offer.group, f"others were {acts[offer.tag]}"):
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
