"""What is raised when a collective fails: which rank is missing, at what, seen from which rank.

A process group in which a collective has failed is lost. Its ranks are no longer in step, and what
one of them sent for the failed collective would be taken for a part of the next. Gloo closes its
connections for that reason; ranks that share memory refuse to go on likewise.

A rank that fails by itself, in a hook of the user's for example, says so in the store of its
process group (:func:`announce`), and so does one that waits for long. The thread of ``beside.py``
watches every wait (:class:`watched`): it looks into the store while the wait lasts, and ends it
when a rank has failed and does not come. Only process groups of gloo are watched, since waiting
for others does not block.

Ranks that leave out what others do wait for each other: each for a collective that the next one has
not come to. Those that wait for long say what they wait for and what they have launched, so each
can tell, without a doubt and long before the time-out, that nobody will ever come.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.beside import PAUSE, ask, do_beside, ensure_thread
from composable_shard.errors import CommunicationError, RankMismatchError, ShardError

_losses: weakref.WeakKeyDictionary[dist.ProcessGroup, str]
_losses = weakref.WeakKeyDictionary()


def lost(group: dist.ProcessGroup, peer: int, got: object) -> ShardError:
    """Give ``group`` up; return the error that says so.

    Args:
        group: The process group.
        peer: The rank within it that was waited for.
        got: What came instead.
    """
    rank = dist.get_process_group_ranks(group)[peer]
    error = ShardError(_bare(f"Expected rank {rank} to take part in a collective, got {got}"))
    _losses.setdefault(group, str(error))
    return error


def mismatch(group: dist.ProcessGroup, peer: int, own: str, got: str) -> RankMismatchError:
    """Give ``group`` up, in which a rank sends other tensors than this one; return the error."""
    rank = dist.get_process_group_ranks(group)[peer]
    error = RankMismatchError(
        f"Expected {own} from rank {rank} as on this one, got {got}; has a parameter been replaced "
        "or converted on one of them alone?"
    )
    _losses.setdefault(group, str(error))
    return error


def is_lost(group: dist.ProcessGroup) -> bool:
    """Tell whether a collective of ``group`` has failed."""
    return group in _losses


def refuse_lost(group: dist.ProcessGroup) -> None:
    """Raise ``ShardError`` if a collective of ``group`` has failed; see the top of this page."""
    if _losses and group in _losses:
        raise ShardError(
            "Expected a process group without failures, got one that had failed before: "
            f"{_losses[group]}"
        )


def named(error: RuntimeError, op: str) -> RuntimeError:
    """Return an error that says on which rank and at what a collective failed.

    Args:
        error: What was raised, by a backend or by a collective of ours; returned as it is if it
            says all that already.
        op: What the rank was doing, such as "gathering group 'blocks.3'".
    """
    said = f"Rank {dist.get_rank()} failed while "
    if isinstance(error, CommunicationError) or str(error).startswith(said):
        return error
    kind = RankMismatchError if isinstance(error, RankMismatchError) else CommunicationError
    return kind(f"{said}{op}: {error}")


_PARTED = "Expected all ranks to run the same, got "


def _bare(text: str) -> str:
    """Return only the sentence of a rank that found a deadlock, if a text ends with one."""
    return text[max(text.rfind(_PARTED), 0) :]


# Ranks that wait for each other. Pure -------------------------------------------------------------


class Wait(NamedTuple):
    """What a rank waits for, and what it has launched before.

    Attributes:
        op: What it waits for, such as "gathering group 'blocks.3'".
        key: Which collective of a model that is, the same on all ranks.
        number: The how many-th of those it waits for.
        launched: How many of each it has launched.
    """

    op: str
    key: str
    number: int
    launched: Mapping[str, int]


def never_comes(own: int, waits: Mapping[int, Wait]) -> int | None:
    """Return a rank that ``own`` waits for, and that waits for ``own`` itself or through others.

    What a rank says of its wait stays true at least until all others have launched what it waits
    for. So those of a circle of ranks, of which each has not launched what the one before waits
    for, will wait for ever, however old what they have said is.

    Args:
        own: This rank; what it says is so now.
        waits: What ranks say that wait, by rank.
    """

    def missing_for(rank: int) -> list[int]:
        wait = waits[rank]
        return [
            other
            for other, theirs in waits.items()
            if other != rank and theirs.launched.get(wait.key, 0) < wait.number
        ]

    for first in missing_for(own):
        seen, ahead = {first}, [first]
        while ahead:
            missing = missing_for(ahead.pop())
            if own in missing:
                return first
            ahead += [other for other in missing if other not in seen]
            seen.update(missing)
    return None


# What ranks tell each other -----------------------------------------------------------------------

_UNEVEN = "ranks whose batches end at different steps iterate by composable_shard.uneven()"
ENDED = f"the end of its process; {_UNEVEN}"
_PATIENCE = 1.0  # seconds that a wait may last before others are asked
_ANSWER = 2.0  # seconds until an error is raised without what the others say
_FAILED, _WAITS = "failed", "waits"  # keys: of whether anybody has said so, and who
_SIGNS_OF_A_TIME_OUT = ("time-out of", "Timed out", "timed out")
_LOAD = 4000  # records of waits that all ranks together read each second, at most
_NUM_TOLD = 8  # ranks whose whereabouts are told
_NO_TAG = (1 << 31) - 1  # of a message that nobody sends
_ANNOUNCED = "_composable_shard_is_announced"

_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, _Board | None]
_boards = weakref.WeakKeyDictionary()
announced: set[_Board] = set()  # those on which this rank says that it failed
_waits: list[watched] = []
_launches: weakref.WeakKeyDictionary[dist.ProcessGroup, _Launches]
_launches = weakref.WeakKeyDictionary()


class _Board:
    """What the ranks of one process group of gloo say in its store.

    Every method that reads or writes the store is called by the watcher's thread alone: the store
    may not answer.

    Attributes:
        num_failures: How often this rank has failed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.num_failures = 0
        self.ranks = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)
        self._place = group.rank()
        self._store = _torch.store_of(group)

    def say(self, key: str, text: str) -> None:
        self._store.set(f"{key} {self._place}", text)
        self._store.set(key, "")

    def take_back(self, key: str) -> None:
        self._store.delete_key(f"{key} {self._place}")

    def _said(self, key: str) -> dict[int, str]:
        """Return what the others say, by their ranks in the job."""
        if not self._store.check([key]):
            return {}
        said = {
            rank: self._store.get(f"{key} {place}").decode()
            for place, rank in enumerate(self.ranks)
            if place != self._place and self._store.check([f"{key} {place}"])
        }
        return {rank: text for rank, text in said.items() if text}  # else taken back just now

    def failure(self) -> str | None:
        """Return which rank has failed at what, if one has failed more often than this one.

        Where all fail alike, nobody waits for what the others have left out.
        """
        found = []
        for rank, text in self._said(_FAILED).items():
            count, _, what = text.partition(" ")
            if int(count) > self.num_failures:
                found.append(f"rank {rank} failed while {what}")
        # One that failed by itself goes before those that failed as it did not come.
        follows = f": {CommunicationError.__name__}: "
        return min(found, key=lambda text: follows in text, default=None)

    def waits(self) -> dict[int, Wait]:
        """Return what the others wait for, as far as they have waited for long, by rank."""
        return {rank: Wait(*json.loads(text)) for rank, text in self._said(_WAITS).items()}

    def whereabouts(self) -> str:
        """Return where the others are, as far as they wait in collectives that are watched."""
        waits = self.waits()
        told = [f"rank {rank} waits while {waits[rank].op}" for rank in list(waits)[:_NUM_TOLD]]
        away = [rank for place, rank in enumerate(self.ranks) if place != self._place]
        away = [rank for rank in away if rank not in waits]
        if away:
            names = [str(rank) for rank in away[:_NUM_TOLD]]
            names += [f"{len(away) - _NUM_TOLD} more"] if len(away) > _NUM_TOLD else []
            told.append(
                f"rank {', '.join(names)} waits in no collective of the library: it may be in "
                "another (dist.barrier(), full_tensor(), a full state dict), be busy, or have "
                f"stopped; {_UNEVEN}"
            )
        return "; ".join(told)

    def break_connections(self) -> None:
        """Let all that this rank waits for in the group fail.

        Gloo closes all of its connections when a message is not there within its time-out; where
        one is closed already, as the rank at its other end has done this, no other is.
        """
        group = self._group()
        if group is None:
            return
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in range(len(self.ranks)):
            if peer != self._place:
                with contextlib.suppress(RuntimeError):
                    group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def board_of(group: dist.ProcessGroup) -> _Board | None:
    """Return where ranks of ``group`` say that they failed, if waits in it are watched."""
    try:
        return _boards[group]
    except KeyError:
        is_gloo = group.size() > 1 and _torch.backend_name(group, torch.device("cpu")) == "gloo"
        return _boards.setdefault(group, _Board(group) if is_gloo else None)


def announce(groups: Iterable[dist.ProcessGroup | None], op: str, error: Exception) -> None:
    """Tell the other ranks that this one has failed, until it calls a collective again.

    Args:
        groups: Whose ranks may wait for it.
        op: What it was doing.
        error: Why; it is announced once, however often it passes by. One of this rank's own gets a
            note.

    Collective: none.
    """
    if getattr(error, _ANNOUNCED, False):
        return
    setattr(error, _ANNOUNCED, True)
    if not isinstance(error, (CommunicationError, RankMismatchError)):
        error.add_note(
            f"Rank {dist.get_rank()} failed while {op}; ranks that did not fail likewise, and "
            "wait for it, are told so (on gloo), or raise when their time-out has passed"
        )
    reason = str(error).partition("\n")[0][:2000]
    reason = reason.removeprefix(f"Rank {dist.get_rank()} failed while {op}: ")
    for group in dict.fromkeys(groups):
        board = None if group is None else board_of(group)
        if board is not None:
            board.num_failures += 1
            announced.add(board)
            text = f"{board.num_failures} {op}: {type(error).__name__}: {reason}"
            ask(functools.partial(board.say, _FAILED, text))
    if announced:
        ask(bool, _ANSWER)  # until it is said: who waits in the store lets nobody else use it


def go_on() -> None:
    """Take back that this rank has failed: it goes on and calls a collective."""
    while announced:
        ask(functools.partial(announced.pop().take_back, _FAILED))


def count_launch(group: dist.ProcessGroup, key: str) -> int:
    """Note that a collective is launched; return the how many-th it is of its ``key``.

    Hazard: a rank of two threads waits in one, and launches in the other what is waited for. Guard:
    the number is 0 from the first launch of a second thread on, for which nobody is accused. Test:
    ``test_of_ranks_with_several_threads_nothing_is_known``.
    """
    launches = _launches.get(group)
    if launches is None:
        launches = _launches[group] = _Launches({}, threading.get_ident())
    if launches.thread != threading.get_ident():
        launches.thread = 0
        return 0
    launches.counts[key] = number = launches.counts.get(key, 0) + 1
    return number


@dataclass
class _Launches:
    """How many collectives this rank has launched in a process group.

    Attributes:
        counts: Of each key.
        thread: The only thread that has; 0 if there were several.
    """

    counts: dict[str, int]
    thread: int


class watched:
    """Watch the wait for collectives inside, and say more of what fails there.

    Hazard: another rank has failed, or calls another collective, and this one waits until its
    time-out. Guard: a thread that looks what others say. Test:
    ``test_a_hook_that_fails_on_one_rank_is_an_error_on_all``.

    Args:
        group: The process group.
        op: What this rank does, such as "gathering group 'blocks.3'".
        key: Which collective of a model that is, the same on all ranks, if they may leave it out.
        number: The how many-th of those it is; see :func:`count_launch`.

    Raises:
        CommunicationError: In the place of any ``RuntimeError``, which is its cause.
    """

    __slots__ = (
        "_answer",
        "_group",
        "_is_said",
        "_key",
        "_looked",
        "_looked_at_waits",
        "_number",
        "_op",
        "_seen",
        "_start",
        "board",
        "failure",
    )

    def __init__(self, group: dist.ProcessGroup, op: str, key: str = "", number: int = 0) -> None:
        self.failure: str | None = None
        self._op = op
        self._key, self._number = key, number
        self._group = group
        self.board = board_of(group)
        self._is_said = False
        self._seen: str | None = None
        self._start = self._looked = self._looked_at_waits = 0.0  # until it waits
        self._answer = ""

    def __enter__(self) -> watched:
        if self.board is not None:
            self._start = self._looked = time.monotonic()
            _waits.append(self)
            ensure_thread()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.board is not None:
            with contextlib.suppress(ValueError):
                _waits.remove(self)
            if self._is_said:
                ask(functools.partial(self._take_back, self.board))
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            told = self.explain(error)
            _losses.setdefault(self._group, str(told))
            raise told from error

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return an error that says at what this rank failed, and what other ranks say of theirs.

        Args:
            error: See :func:`named`.
        """
        error, board = named(error, self._op), self.board
        if board is None or type(error) is not CommunicationError:
            return error
        has_waited = self._start > 0  # the launch of a collective fails without
        is_late = has_waited and any(sign in str(error) for sign in _SIGNS_OF_A_TIME_OUT)
        ask(functools.partial(self._ask, board, is_late), _ANSWER)
        own = str(error).removeprefix(f"Rank {dist.get_rank()} failed while {self._op}: ")
        if not self._answer or self._answer in own or own in self._answer:
            return error  # nothing new: it is the cause, or another rank says the same
        bare = _bare(text := f"{error}; {self._answer}")
        return CommunicationError(text) if bare == text else named(ShardError(bare), self._op)

    def _ask(self, board: _Board, is_late: bool) -> None:
        failure = self.failure or board.failure() or self._deadlock(board)
        if failure is not None:
            self._answer = failure
        elif is_late:
            self._answer = (
                f"{board.whereabouts()}. All ranks must run evaluation, generation, saving and the "
                "same branches; docs/hangs.md says how to find the rank that does not"
            )

    def look(self) -> None:
        """Look at what others say, if it is time to. Called by the watcher."""
        board, now = self.board, time.monotonic()
        assert board is not None
        pause = PAUSE + len(board.ranks) / 2000  # they share the store
        if self.failure is not None or now < self._start + _PATIENCE or now < self._looked + pause:
            return
        self._looked = now
        if not self._is_said:
            self._is_said = True
            board.say(_WAITS, json.dumps(self._own()))
        failure = board.failure()
        is_sure = failure is None or failure == self._seen
        if failure is None and now >= self._looked_at_waits + len(board.ranks) ** 2 / _LOAD:
            self._looked_at_waits = now
            failure = self._deadlock(board)
        if failure is not None and is_sure and self in _waits:
            self.failure = failure
            board.break_connections()
        self._seen = failure
        if self not in _waits:
            self._take_back(board)

    def _take_back(self, board: _Board) -> None:
        """Wait no more; a deadlock stays said, for the other ranks to find it too."""
        if _PARTED not in (self.failure or ""):
            board.take_back(_WAITS)

    def _own(self) -> Wait:
        launches = _launches.get(self._group)
        launched = {} if launches is None else dict(launches.counts)
        return Wait(self._op, self._key, self._number, launched)

    def _deadlock(self, board: _Board) -> str | None:
        """Return who waits for this rank while it waits for them, if anybody does."""
        if not self._number:
            return None
        waits, this = board.waits(), dist.get_rank()
        rank = never_comes(this, {**waits, this: self._own()})
        if rank is None:
            return None
        first, second = sorted([(rank, waits[rank].op), (this, self._op)])
        return (
            f"{_PARTED}rank {first[0]} {first[1]} and rank {second[0]} {second[1]}: evaluation, "
            "generation or saving on some ranks only, or a branch that only some ranks take; run "
            "it on all ranks, or call sit_out(module) where a rank has nothing for a module"
        )


def failure_in(group: dist.ProcessGroup) -> str | None:
    """Return the failure of a rank that ends the waits in ``group``, if there is one."""
    return next((one.failure for one in list(_waits) if one.board is _boards.get(group)), None)


def _look_at_waits() -> None:
    for wait in list(_waits):
        with contextlib.suppress(RuntimeError):
            wait.look()


do_beside(_look_at_waits)
