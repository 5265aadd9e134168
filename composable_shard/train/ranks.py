"""What ranks tell each other in small objects, so that all of them go on or none."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import _torch
from composable_shard.arguments import check_process_group
from composable_shard.core.transport.process_groups import first_difference
from composable_shard.errors import CommunicationError, RankMismatchError, ShardError

_log = logging.getLogger("composable_shard")


class Ranks:
    """The ranks of a process group, or this process alone if there is no process group.

    Attributes:
        group: The process group; ``None`` alone.
        is_first: Whether this is the first of them.
        doing: What they do, for messages.
        failure: What went wrong first on this rank, if anything.

    Raises:
        TypeError: If ``process_group`` is not one, such as on a rank that is not a member.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, doing: str) -> None:
        check_process_group(process_group)
        self.doing = doing
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = process_group or dist.group.WORLD
        self.is_first = self.group is None or dist.get_rank(self.group) == 0
        self.failure: str | None = None

    @property
    def numbers(self) -> list[int]:
        """The global ranks."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def gather(self, own: Any) -> list[Any]:
        """Return what each rank says. Collective: an all-gather of an object."""
        if self.group is None:
            return [own]
        heard: list[Any] = [None] * self.group.size()
        with self.naming_failures():
            dist.all_gather_object(heard, own, group=self.group)
        return heard

    def say(self, word: int) -> list[int]:
        """Return what each rank says, a number. Collective: an all-gather of 8 bytes."""
        if self.group is None:
            return [word]
        device = _torch.device_for(self.group, torch.device("cpu"))
        heard = _torch.empty(self.group.size(), 1, dtype=torch.int64, device=device)
        with self.naming_failures():
            _torch.all_gather_rows(heard, torch.tensor([word], device=device), self.group)
        return [int(theirs) for theirs in heard.flatten().tolist()]

    def from_first(self, own: Any) -> Any:
        """Return what the first rank says. Collective: a broadcast of an object."""
        return self.from_one(own, self.numbers[0])

    def from_one(self, own: Any, number: int) -> Any:
        """Return what the rank of a number says. Collective: a broadcast of an object."""
        if self.group is None:
            return own
        box = [own]
        with self.naming_failures():
            dist.broadcast_object_list(box, src=number, group=self.group)
        return box[0]

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep the text of an exception within, for all ranks to hear of it in :meth:`agree`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever it is)
            self.failure = _text_of(error)

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Tell the other ranks of an exception within, in the place of their next :meth:`agree`.

        Raises:
            Exception: That, if it is the same on all ranks.
            ShardError: On all ranks, if it is not.

        Collective: none, but that of ``agree`` if it raises.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 (as above)
            self.failure = _text_of(error)
            self.agree([], "", f"all ranks to begin {self.doing}", refusal=error)

    def agree(
        self,
        facts: Sequence[str],
        what: str,
        expected: str,
        *,
        remedy: str = "",
        refusal: Exception | None = None,
    ) -> None:
        """Let all ranks go on if none of them has failed and all have the same facts.

        Args:
            facts: What must be the same on all ranks.
            what: What the facts are of, for messages.
            expected: What should be, for the message if this rank has failed.
            remedy: The end of that message.
            refusal: What is raised instead if all ranks have failed alike.

        Raises:
            ShardError: On all ranks, with what went wrong on the first one of those that failed.
            RankMismatchError: On all ranks, with the first difference to the first rank.

        Collective: an all-gather of a small object; a second one before it raises.
        """
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        heard = self.gather((digest, self.failure, expected))
        if refusal is not None and {failure for _, failure, _ in heard} == {self.failure}:
            raise refusal
        for rank, (_, failure, theirs) in zip(self.numbers, heard, strict=True):
            if failure is not None:
                raise ShardError(f"Expected {theirs}, got on rank {rank}: {failure}{remedy}")
        if len({digest for digest, *_ in heard}) > 1:
            text = first_difference(self.gather(list(facts)), self.numbers, what)
            raise RankMismatchError(text)

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Tell what the ranks were doing if a collective within fails.

        Raises:
            CommunicationError: If it does.
        """
        try:
            yield
        except (torch.OutOfMemoryError, ShardError):
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"Rank {dist.get_rank()} failed while {self.doing}: {error}"
            ) from error


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Together:
    """Lets the ranks of some meshes go on together, or none of them.

    Hazard: a rank fails alone, and others wait for it, or have sent already what it would take for
    what it asks for later. Guard: all say a word before each. Tests:
    ``test_a_first_rank_that_fails_gets_nothing_old_later``, ``test_one_rank_leaves_unsharded``.

    Args:
        meshes: Their ranks. Where there are none, each rank goes on by itself, and others notice.
        doing: What they do, for messages.
    """

    def __init__(self, meshes: Sequence[DeviceMesh], doing: str) -> None:
        groups = [
            mesh.get_group(axis) for mesh in dict.fromkeys(meshes) for axis in range(mesh.ndim)
        ]
        self._ranks = [Ranks(group, doing) for group in dict.fromkeys(groups)]
        self._doing = doing
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep an exception within for :meth:`go_on`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever it is)
            self._failure = error

    def go_on(self) -> None:
        """Raise on all ranks if one has failed. Collective: 8 bytes along each axis."""
        failed = -1
        if self._failure is not None:
            failed = dist.get_rank()
            # the others may come late, or never if they are in another collective
            _log.warning(
                "rank %d failed before %s, and tells the other ranks: %r",
                failed,
                self._doing,
                self._failure,
            )
        try:
            for ranks in self._ranks:
                failed = max(ranks.say(failed))
        except CommunicationError:
            if self._failure is None:
                raise
        if self._failure is not None:
            raise self._failure
        if failed >= 0:
            raise ShardError(
                f"Expected rank {failed} to take part in {self._doing}, got a failure there; see "
                "the error that it raises"
            )
