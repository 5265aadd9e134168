"""The errors of failed collectives: they name the missing rank and the operation of this rank.

After a failed collective, its process group is lost: the ranks are out of step, and a rank could
mistake a message of the failed collective for a message of the next one. So gloo closes its
connections, and ranks that share memory refuse every later collective.

A rank that fails on its own, in a hook of the user for example, publishes the failure in the store
of its process group (:func:`announce`). A rank that waits for more than a second publishes its
wait. The thread of ``background.py`` watches every wait (:class:`watched`): it polls the store
while the wait lasts, and ends the wait when another rank has failed. It only watches process groups
of gloo, since waits of other backends do not block the host.

Ranks that run different collectives wait for each other in a cycle: each waits for a collective
that the next one does not launch. A published wait has the awaited collective and the collectives
that the rank has launched. If the waiting ranks form a cycle, it is a deadlock, and all of them
raise, long before the time-out.
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
from composable_shard.core.transport import background
from composable_shard.errors import CommunicationError, RankMismatchError, ShardError

# The process groups in which a collective has failed, each with the text of the error.
_lost: weakref.WeakKeyDictionary[dist.ProcessGroup, str]
_lost = weakref.WeakKeyDictionary()


def missing_rank(group: dist.ProcessGroup, peer: int, got: object) -> ShardError:
    """Mark ``group`` as lost because a rank is missing; return the error to raise.

    Args:
        group: The process group.
        peer: The awaited rank, within the group.
        got: What this rank got instead.
    """
    rank = dist.get_process_group_ranks(group)[peer]
    error = ShardError(_shortened(f"Expected rank {rank} to take part in a collective, got {got}"))
    _lost.setdefault(group, str(error))
    return error


def mismatch(group: dist.ProcessGroup, peer: int, expected: str, got: str) -> RankMismatchError:
    """Mark ``group`` as lost because two ranks send different tensors; return the error.

    Args:
        group: The process group.
        peer: The other rank, within the group.
        expected: The tensors of this rank.
        got: The tensors of the other rank.
    """
    rank = dist.get_process_group_ranks(group)[peer]
    error = RankMismatchError(
        f"Expected {expected} from rank {rank} as on this rank, got {got}; has a parameter been "
        "replaced or converted on one of the two ranks only?"
    )
    _lost.setdefault(group, str(error))
    return error


def is_lost(group: dist.ProcessGroup) -> bool:
    """Return whether a collective of ``group`` has failed."""
    return group in _lost


def raise_if_lost(group: dist.ProcessGroup) -> None:
    """Raise ``ShardError`` if a collective of ``group`` has failed."""
    if _lost and group in _lost:
        raise ShardError(
            "Expected a process group without failures, got one that had failed before: "
            f"{_lost[group]}"
        )


def with_op(error: RuntimeError, op: str) -> RuntimeError:
    """Return an error that names the rank and the operation of a failed collective.

    Args:
        error: The error of the backend or of this library; returned unchanged if it names both.
        op: The operation, such as "gathering group 'blocks.3'".
    """
    prefix = f"Rank {dist.get_rank()} failed while "
    if isinstance(error, CommunicationError) or str(error).startswith(prefix):
        return error
    kind = RankMismatchError if isinstance(error, RankMismatchError) else CommunicationError
    return kind(f"{prefix}{op}: {error}")


_DEADLOCK = "Expected all ranks to run the same collective, got "


def _shortened(text: str) -> str:
    """Return the sentence about a deadlock at the end of a text; without one, the whole text."""
    return text[max(text.rfind(_DEADLOCK), 0) :]


# Deadlocks, found from published waits, without communication -------------------------------------


class Wait(NamedTuple):
    """The collective that a rank waits for, and those that it has launched.

    Attributes:
        op: The operation, such as "gathering group 'blocks.3'".
        key: The key of the collective, the same on all ranks.
        number: 1 for the first collective with this key, and so on; 0 if unknown.
        launched: The number of launched collectives by key.
    """

    op: str
    key: str
    number: int
    launched: Mapping[str, int]


def find_deadlock(rank: int, waits: Mapping[int, Wait]) -> int | None:
    """Return the next rank of a cycle of waits through ``rank``; ``None`` if there is no cycle.

    A published wait stays true until all other ranks have launched the awaited collective. So if
    the waits form a cycle, all ranks of the cycle wait forever, however old the records are.

    Args:
        rank: This rank; its record is up to date.
        waits: The published waits, by rank.
    """

    def awaited_by(waiting: int) -> list[int]:
        wait = waits[waiting]
        return [
            other
            for other, other_wait in waits.items()
            if other != waiting and other_wait.launched.get(wait.key, 0) < wait.number
        ]

    for first in awaited_by(rank):
        visited, to_visit = {first}, [first]
        while to_visit:
            awaited = awaited_by(to_visit.pop())
            if rank in awaited:
                return first
            to_visit += [other for other in awaited if other not in visited]
            visited.update(awaited)
    return None


# Published failures and waits ---------------------------------------------------------------------

_UNEVEN = "if ranks have different numbers of batches, iterate with composable_shard.uneven()"
ENDED = f"the end of its process; {_UNEVEN}"  # in a message: "got the end of its process"
_POLL_AFTER = 1.0  # seconds that a wait may last before the store is polled
_STORE_TIMEOUT = 2.0  # seconds to wait for the store; after that, the error names no cause
_FAILED, _WAITS = "failed", "waits"  # store keys; f"{key} {rank in the group}" has a rank's text
_SIGNS_OF_A_TIME_OUT = ("time-out of", "Timed out", "timed out")
_READ_RATE = 4000  # records of waits that all ranks together read each second, at most
_NUM_LOCATED = 8  # the maximum number of ranks in a list of an error message
_NO_TAG = (1 << 31) - 1  # the tag of a message that no rank sends
_ANNOUNCED = "_composable_shard_is_announced"

_statuses: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupStatus | None]
_statuses = weakref.WeakKeyDictionary()
announced: set[_GroupStatus] = set()  # the groups in which this rank has published a failure
_waits: list[watched] = []
_launches: weakref.WeakKeyDictionary[dist.ProcessGroup, _Launches]
_launches = weakref.WeakKeyDictionary()


class _GroupStatus:
    """The failures and waits that the ranks of a gloo process group publish in its store.

    Only the background thread calls the methods that use the store, since the store may not answer.

    Attributes:
        num_failures: The number of failures that this rank has announced, including those that a
            failure of another rank has caused.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.num_failures = 0
        self.ranks = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)
        self._group_rank = group.rank()
        self._store = _torch.store_of(group)

    def publish(self, key: str, text: str) -> None:
        self._store.set(f"{key} {self._group_rank}", text)
        self._store.set(key, "")  # some rank has published

    def withdraw(self, key: str) -> None:
        # Empty, not deleted: otherwise the `get` of another rank would wait for the key.
        self._store.set(f"{key} {self._group_rank}", "")

    def _published(self, key: str) -> dict[int, str]:
        """Return the texts that the other ranks have published, by global rank."""
        if not self._store.check([key]):
            return {}
        texts = {
            rank: self._store.get(f"{key} {index}").decode()
            for index, rank in enumerate(self.ranks)
            if index != self._group_rank and self._store.check([f"{key} {index}"])
        }
        return {rank: text for rank, text in texts.items() if text}  # empty if withdrawn

    def failure(self) -> str | None:
        """Return the failure of a rank that has announced more failures than this one, if any.

        A failure of one rank makes the waits of all others fail, so every rank announces one more
        failure. A rank with a larger count has a failure that this rank has not yet seen. Failures
        of ranks with the same count belong to earlier steps.
        """
        failures = []
        for rank, text in self._published(_FAILED).items():
            count, _, description = text.partition(" ")
            if int(count) > self.num_failures:
                failures.append(f"rank {rank} failed while {description}")
        # Prefer the first cause to the failures that it led to on other ranks.
        sign_of_effect = f": {CommunicationError.__name__}: "
        return min(failures, key=lambda text: sign_of_effect in text, default=None)

    def waits(self) -> dict[int, Wait]:
        """Return the waits that other ranks have published, by rank."""
        return {rank: Wait(*json.loads(text)) for rank, text in self._published(_WAITS).items()}

    def whereabouts(self) -> str:
        """Describe the published waits of other ranks; list the ranks that have published none."""
        waits, limit = self.waits(), _NUM_LOCATED
        places = [f"rank {rank} waits while {waits[rank].op}" for rank in list(waits)[:limit]]
        others = [rank for index, rank in enumerate(self.ranks) if index != self._group_rank]
        others = [rank for rank in others if rank not in waits]
        if others:
            names = [str(rank) for rank in others[:limit]]
            names += [f"{len(others) - limit} more"] if len(others) > limit else []
            places.append(
                f"rank {', '.join(names)} waits in no collective of the library: it may be in "
                "another (dist.barrier(), full_tensor(), a full state dict), be busy, or have "
                f"stopped; {_UNEVEN}"
            )
        return "; ".join(places)

    def break_connections(self) -> None:
        """Make all waits of this rank in the group fail.

        If a receive times out, gloo closes all connections, unless the connection to the sender is
        closed already, for example by this call on another rank. So this method receives from each
        rank in turn.
        """
        group = self._group()
        if group is None:
            return
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in range(len(self.ranks)):
            if peer != self._group_rank:
                with contextlib.suppress(RuntimeError):
                    group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def status_of(group: dist.ProcessGroup) -> _GroupStatus | None:
    """Return the status of ``group``; ``None`` unless it is a gloo group of several ranks."""
    try:
        return _statuses[group]
    except KeyError:
        is_gloo = group.size() > 1 and _torch.backend_name(group, torch.device("cpu")) == "gloo"
        return _statuses.setdefault(group, _GroupStatus(group) if is_gloo else None)


def announce(groups: Iterable[dist.ProcessGroup | None], op: str, error: Exception) -> None:
    """Publish the failure of this rank; the next collective of this rank withdraws it.

    Args:
        groups: The process groups with ranks that may wait for this one.
        op: The operation that failed.
        error: The error. It is published once, and gets a note if this rank caused it.

    Collective: none.
    """
    if getattr(error, _ANNOUNCED, False):
        return
    setattr(error, _ANNOUNCED, True)
    if not isinstance(error, (CommunicationError, RankMismatchError)):
        error.add_note(
            f"Rank {dist.get_rank()} failed while {op}; on gloo, the ranks that wait for this "
            "rank raise an error that names this rank; on other backends, they time out"
        )
    reason = str(error).partition("\n")[0][:2000]
    reason = reason.removeprefix(f"Rank {dist.get_rank()} failed while {op}: ")
    for group in dict.fromkeys(groups):
        status = None if group is None else status_of(group)
        if status is not None:
            status.num_failures += 1
            announced.add(status)
            text = f"{status.num_failures} {op}: {type(error).__name__}: {reason}"
            background.call_once(functools.partial(status.publish, _FAILED, text))
    if announced:
        background.call_once(bool, _STORE_TIMEOUT)  # returns when the text is published


def withdraw_failures() -> None:
    """Withdraw the published failures of this rank, since it calls a collective again."""
    while announced:
        background.call_once(functools.partial(announced.pop().withdraw, _FAILED))


def count_launch(group: dist.ProcessGroup, key: str) -> int:
    """Count a launch; return its number among the launches of its ``key``.

    Hazard: a rank waits on one thread and launches the awaited collective on another, which is no
    deadlock. Guard: once a second thread launches, numbers are 0, and no deadlock is reported.
    Test: ``test_of_ranks_with_several_threads_nothing_is_known``.
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
    """Watch the waits of a ``with`` block, and explain a failure.

    Hazard: another rank has failed, or runs another collective, and this rank waits until its
    time-out. Guard: a thread polls the failures and waits that other ranks publish. Test:
    ``test_a_hook_that_fails_on_one_rank_is_an_error_on_all``.

    Args:
        group: The process group.
        op: The operation, such as "gathering group 'blocks.3'".
        key: The key of the collective, the same on all ranks.
        number: The number that :func:`count_launch` returned; 0 to skip the search for a deadlock.

    Raises:
        CommunicationError: If the block raises a ``RuntimeError``, which becomes the ``__cause__``.
        RankMismatchError: Likewise, if the block raises a ``RankMismatchError``.
    """

    __slots__ = (
        "_cause",
        "_group",
        "_is_published",
        "_key",
        "_number",
        "_op",
        "_polled",
        "_polled_waits",
        "_previous_failure",
        "_start",
        "failure",
        "status",
    )

    def __init__(self, group: dist.ProcessGroup, op: str, key: str = "", number: int = 0) -> None:
        self.failure: str | None = None
        self._op = op
        self._key, self._number = key, number
        self._group = group
        self.status = status_of(group)
        self._is_published = False
        self._previous_failure: str | None = None
        self._start = self._polled = self._polled_waits = 0.0  # the wait has not begun
        self._cause = ""

    def __enter__(self) -> watched:
        if self.status is not None:
            self._start = self._polled = time.monotonic()
            _waits.append(self)
            background.ensure_thread()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status is not None:
            with contextlib.suppress(ValueError):
                _waits.remove(self)
            if self._is_published:
                background.call_once(functools.partial(self._withdraw, self.status))
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            explained = self.explain(error)
            _lost.setdefault(self._group, str(explained))
            raise explained from error

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return an error that names the operation of this rank, and the failures of others.

        Args:
            error: See :func:`with_op`.
        """
        error, status = with_op(error, self._op), self.status
        if status is None or type(error) is not CommunicationError:
            return error
        has_waited = self._start > 0  # false if the launch failed
        is_late = has_waited and any(sign in str(error) for sign in _SIGNS_OF_A_TIME_OUT)
        background.call_once(functools.partial(self._find_cause, status, is_late), _STORE_TIMEOUT)
        reason = str(error).removeprefix(f"Rank {dist.get_rank()} failed while {self._op}: ")
        if not self._cause or self._cause in reason or reason in self._cause:
            return error  # the cause says nothing new
        # The sentence about a deadlock replaces the text of the backend.
        short = _shortened(text := f"{error}; {self._cause}")
        return CommunicationError(text) if short == text else with_op(ShardError(short), self._op)

    def _find_cause(self, status: _GroupStatus, is_late: bool) -> None:
        failure = self.failure or status.failure() or self._deadlock(status)
        if failure is not None:
            self._cause = failure
        elif is_late:
            self._cause = (
                f"{status.whereabouts()}. All ranks must run evaluation, generation, saving and "
                "the same branches; docs/hangs.md says how to find the rank that runs other code"
            )

    def poll(self) -> None:
        """Poll the store if it is time. Called on the background thread."""
        status, now = self.status, time.monotonic()
        assert status is not None
        pause = background.PERIOD + len(status.ranks) / 2000  # longer if more ranks poll the store
        if self.failure is not None or now < max(self._start + _POLL_AFTER, self._polled + pause):
            return
        self._polled = now
        if not self._is_published:
            self._is_published = True
            status.publish(_WAITS, json.dumps(self._current_wait()))
        failure = status.failure()
        # A failure may be withdrawn, so two polls in a row must find it. A deadlock is final.
        is_confirmed = failure is None or failure == self._previous_failure
        if failure is None and now >= self._polled_waits + len(status.ranks) ** 2 / _READ_RATE:
            self._polled_waits = now
            failure = self._deadlock(status)
        if failure is not None and is_confirmed and self in _waits:
            self.failure = failure
            status.break_connections()
        self._previous_failure = failure
        if self not in _waits:  # the wait has ended during this poll
            self._withdraw(status)

    def _withdraw(self, status: _GroupStatus) -> None:
        """Withdraw the wait, but not after a deadlock, so that the other ranks find it, too."""
        if _DEADLOCK not in (self.failure or ""):
            status.withdraw(_WAITS)

    def _current_wait(self) -> Wait:
        launches = _launches.get(self._group)
        launched = {} if launches is None else dict(launches.counts)
        return Wait(self._op, self._key, self._number, launched)

    def _deadlock(self, status: _GroupStatus) -> str | None:
        """Return the sentence about a deadlock with another rank, if there is one."""
        if not self._number:
            return None
        waits, this = status.waits(), dist.get_rank()
        rank = find_deadlock(this, {**waits, this: self._current_wait()})
        if rank is None:
            return None
        first, second = sorted([(rank, waits[rank].op), (this, self._op)])
        return (
            f"{_DEADLOCK}rank {first[0]} {first[1]} and rank {second[0]} {second[1]}; the cause "
            "may be evaluation, generation or saving on some ranks only, or a branch that only "
            "some ranks take; run the same on all ranks, or call sit_out(module) on ranks without "
            "input for a module"
        )


def failure_in(group: dist.ProcessGroup) -> str | None:
    """Return the failure that ends the waits in ``group``, if there is one."""
    status = _statuses.get(group)
    return next((wait.failure for wait in list(_waits) if wait.status is status), None)


def _poll_waits() -> None:
    for wait in list(_waits):
        with contextlib.suppress(RuntimeError):
            wait.poll()


background.call_periodically(_poll_waits)
