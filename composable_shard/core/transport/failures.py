"""The errors of a failed collective: which rank is missing, in which operation, on which rank.

A process group in which a collective has failed is lost: its ranks are no longer in step, and a
message of the failed collective would be taken for one of the next. So gloo closes its connections,
and ranks that share memory refuse to go on likewise.

A rank that fails by itself, in a hook of the user for example, publishes that in the store of its
process group (:func:`announce`). So does a rank that waits for long. The thread of ``beside.py``
watches every wait (:class:`watched`): it polls the store while the wait lasts, and ends the wait
when another rank has failed. Only process groups of gloo are watched, since waits of other backends
do not block the host.

Ranks that run different collectives wait for each other, each for a collective that the next one
does not launch. Ranks that wait for long publish the collective that they wait for, and the
collectives that they have launched. If the waiting ranks form a cycle, it is a deadlock, and all of
them raise, long before the time-out.
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
from composable_shard.core.transport.beside import PAUSE, ensure_thread, repeat, run_once
from composable_shard.errors import CommunicationError, RankMismatchError, ShardError

_losses: weakref.WeakKeyDictionary[dist.ProcessGroup, str]
_losses = weakref.WeakKeyDictionary()


def lost(group: dist.ProcessGroup, peer: int, got: object) -> ShardError:
    """Mark ``group`` as lost; return the error that says so.

    Args:
        group: The process group.
        peer: The awaited rank, within the group.
        got: What this rank got instead.
    """
    rank = dist.get_process_group_ranks(group)[peer]
    error = ShardError(_bare(f"Expected rank {rank} to take part in a collective, got {got}"))
    _losses.setdefault(group, str(error))
    return error


def mismatch(group: dist.ProcessGroup, peer: int, own: str, got: str) -> RankMismatchError:
    """Mark ``group`` as lost, since a rank sends other tensors than this one; return the error."""
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
    """Raise ``ShardError`` if a collective of ``group`` has failed."""
    if _losses and group in _losses:
        raise ShardError(
            "Expected a process group without failures, got one that had failed before: "
            f"{_losses[group]}"
        )


def named(error: RuntimeError, op: str) -> RuntimeError:
    """Return an error that names the rank and the operation of a failed collective.

    Args:
        error: The error of the backend or of this library; returned as it is if it names both.
        op: The operation, such as "gathering group 'blocks.3'".
    """
    said = f"Rank {dist.get_rank()} failed while "
    if isinstance(error, CommunicationError) or str(error).startswith(said):
        return error
    kind = RankMismatchError if isinstance(error, RankMismatchError) else CommunicationError
    return kind(f"{said}{op}: {error}")


_PARTED = "Expected all ranks to run the same, got "


def _bare(text: str) -> str:
    """Return the sentence about a deadlock alone, if a text ends with one."""
    return text[max(text.rfind(_PARTED), 0) :]


# Ranks that wait for each other. Pure -------------------------------------------------------------


class Wait(NamedTuple):
    """The collective that a rank waits for, and those that it has launched.

    Attributes:
        op: The operation, such as "gathering group 'blocks.3'".
        key: The key of the collective, the same on all ranks.
        number: The number of the awaited collective among those of its key.
        launched: The number of launched collectives by key.
    """

    op: str
    key: str
    number: int
    launched: Mapping[str, int]


def never_comes(own: int, waits: Mapping[int, Wait]) -> int | None:
    """Return a rank that ``own`` waits for, and that waits for ``own`` itself or through others.

    A published wait stays true until all other ranks have launched the awaited collective. So if
    each rank of a cycle has not launched what the one before waits for, all wait for ever, however
    old the published waits are.

    Args:
        own: This rank, whose wait is up to date.
        waits: The published waits, by rank.
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


# What ranks publish -------------------------------------------------------------------------------

_UNEVEN = "ranks whose batches end at different steps iterate by composable_shard.uneven()"
ENDED = f"the end of its process; {_UNEVEN}"
_PATIENCE = 1.0  # seconds that a wait may last before the store is polled
_ANSWER = 2.0  # seconds to wait for the store before an error is raised without it
_FAILED, _WAITS = "failed", "waits"  # keys of the store: whether any rank has, and for each rank
_SIGNS_OF_A_TIME_OUT = ("time-out of", "Timed out", "timed out")
_LOAD = 4000  # records of waits that all ranks together read each second, at most
_NUM_TOLD = 8  # ranks that a message locates
_NO_TAG = (1 << 31) - 1  # the tag of a message that no rank sends
_ANNOUNCED = "_composable_shard_is_announced"

_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, _Board | None]
_boards = weakref.WeakKeyDictionary()
announced: set[_Board] = set()  # the boards on which this rank has published its failure
_waits: list[watched] = []
_launches: weakref.WeakKeyDictionary[dist.ProcessGroup, _Launches]
_launches = weakref.WeakKeyDictionary()


class _Board:
    """The store of one process group of gloo, in which its ranks publish failures and waits.

    Only the watcher's thread calls the methods that use the store, since the store may not answer.

    Attributes:
        num_failures: The number of failures of this rank.
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
        """Return what the other ranks have published, by their ranks in the job."""
        if not self._store.check([key]):
            return {}
        said = {
            rank: self._store.get(f"{key} {place}").decode()
            for place, rank in enumerate(self.ranks)
            if place != self._place and self._store.check([f"{key} {place}"])
        }
        return {rank: text for rank, text in said.items() if text}  # else taken back just now

    def failure(self) -> str | None:
        """Return the failure of a rank that has failed more often than this one, if there is one.

        Where all ranks fail alike, none waits for another.
        """
        found = []
        for rank, text in self._said(_FAILED).items():
            count, _, what = text.partition(" ")
            if int(count) > self.num_failures:
                found.append(f"rank {rank} failed while {what}")
        # The first cause goes before the failures that it led to on other ranks.
        follows = f": {CommunicationError.__name__}: "
        return min(found, key=lambda text: follows in text, default=None)

    def waits(self) -> dict[int, Wait]:
        """Return by rank the waits of other ranks that have lasted for long."""
        return {rank: Wait(*json.loads(text)) for rank, text in self._said(_WAITS).items()}

    def whereabouts(self) -> str:
        """Return where the other ranks are, as far as their waits are watched."""
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
        """Let all waits of this rank in the group fail.

        Gloo closes all connections when a message is not there within its time-out, but none if one
        is closed already, as after this call on the other rank. So there is a message for each.
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
    """Return the board of ``group`` if its waits are watched."""
    try:
        return _boards[group]
    except KeyError:
        is_gloo = group.size() > 1 and _torch.backend_name(group, torch.device("cpu")) == "gloo"
        return _boards.setdefault(group, _Board(group) if is_gloo else None)


def announce(groups: Iterable[dist.ProcessGroup | None], op: str, error: Exception) -> None:
    """Publish that this rank has failed, until it calls a collective again.

    Args:
        groups: The process groups whose ranks may wait for it.
        op: The operation that failed.
        error: The error, which is announced once and gets a note if this rank caused it.

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
            run_once(functools.partial(board.say, _FAILED, text))
    if announced:
        run_once(bool, _ANSWER)  # until it is published: a rank that waits in the store blocks it


def go_on() -> None:
    """Withdraw the failure of this rank, which calls a collective again."""
    while announced:
        run_once(functools.partial(announced.pop().take_back, _FAILED))


def count_launch(group: dist.ProcessGroup, key: str) -> int:
    """Count a launch; return its number among the launches of its ``key``.

    Hazard: a rank waits on one thread, and launches the awaited collective on another. Guard: once
    a second thread launches, numbers are 0, and no deadlock is told. Test:
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
    """The launches of this rank in a process group.

    Attributes:
        counts: The number of launches by key.
        thread: The only thread that launches; 0 if there are several.
    """

    counts: dict[str, int]
    thread: int


class watched:
    """Watch the wait for collectives inside, and explain its failure.

    Hazard: another rank has failed, or runs another collective, and this one waits until its
    time-out. Guard: a thread polls what other ranks publish. Test:
    ``test_a_hook_that_fails_on_one_rank_is_an_error_on_all``.

    Args:
        group: The process group.
        op: The operation, such as "gathering group 'blocks.3'".
        key: The key of the collective, the same on all ranks, if a rank may leave it out.
        number: Its number; see :func:`count_launch`.

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
                run_once(functools.partial(self._take_back, self.board))
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            told = self.explain(error)
            _losses.setdefault(self._group, str(told))
            raise told from error

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return an error that names the operation of this rank, and the failures of others.

        Args:
            error: See :func:`named`.
        """
        error, board = named(error, self._op), self.board
        if board is None or type(error) is not CommunicationError:
            return error
        has_waited = self._start > 0  # the launch of a collective fails without
        is_late = has_waited and any(sign in str(error) for sign in _SIGNS_OF_A_TIME_OUT)
        run_once(functools.partial(self._ask, board, is_late), _ANSWER)
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
        """Poll the store if it is time to. Called by the watcher."""
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
        """Withdraw the wait; after a deadlock it stays, for the other ranks to find it too."""
        if _PARTED not in (self.failure or ""):
            board.take_back(_WAITS)

    def _own(self) -> Wait:
        launches = _launches.get(self._group)
        launched = {} if launches is None else dict(launches.counts)
        return Wait(self._op, self._key, self._number, launched)

    def _deadlock(self, board: _Board) -> str | None:
        """Return the sentence about a deadlock with another rank, if there is one."""
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
    """Return the failure that ends the waits in ``group``, if there is one."""
    return next((one.failure for one in list(_waits) if one.board is _boards.get(group)), None)


def _look_at_waits() -> None:
    for wait in list(_waits):
        with contextlib.suppress(RuntimeError):
            wait.look()


repeat(_look_at_waits)
