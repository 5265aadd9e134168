"""Small objects that ranks exchange, so that either all ranks continue or none."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import _torch
from composable_shard.arguments import check_process_group
from composable_shard.core.transport.failures import with_op
from composable_shard.core.transport.process_groups import first_difference, gather_by_rank
from composable_shard.errors import RankMismatchError, ShardError


class Ranks:
    """The ranks that take part in an operation; this process alone if there is no process group.

    Args:
        group: Their process group; all ranks if absent.
        doing: The operation, for messages.
        meshes: The ranks of some meshes instead, or this process alone if there are none. They
            exchange objects along each axis.

    Attributes:
        doing: The operation, for messages.
        groups: The process groups.
        group: The first of them; ``None`` alone.
        is_first: Whether this is the first rank of ``group``.
        failure: The text of the last exception of this rank, if it has failed.

    Raises:
        TypeError: If ``group`` is no process group, as on a rank that is not a member.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, doing: str, meshes: list[DeviceMesh] | None = None
    ) -> None:
        check_process_group(group)
        self.doing = doing
        self.groups: list[dist.ProcessGroup] = []
        if meshes is not None:
            axes = [(mesh, axis) for mesh in dict.fromkeys(meshes) for axis in range(mesh.ndim)]
            self.groups = list(dict.fromkeys(mesh.get_group(axis) for mesh, axis in axes))
        elif dist.is_available() and dist.is_initialized():
            self.groups = [group or cast(dist.ProcessGroup, dist.group.WORLD)]
        self.group = self.groups[0] if self.groups else None
        self.is_first = self.group is None or dist.get_rank(self.group) == 0
        self.failure: str | None = None

    @property
    def numbers(self) -> list[int]:
        """The global ranks of ``group``."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def gather(self, own: Any) -> dict[int, Any]:
        """Return the objects of all ranks by number. Collective: an all-gather of an object."""
        return gather_by_rank(own, self.groups, self.doing) if self.groups else {0: own}

    def say(self, word: int) -> int:
        """Return the largest word of any rank. Collective: an all-reduce of 8 bytes."""
        for group in self.groups:
            device = _torch.device_for(group, torch.device("cpu"))
            largest = torch.tensor([word], dtype=torch.int64, device=device)
            with naming_failures(self.doing):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            word = int(largest)
        return word

    def from_one(self, own: Any, number: int | None = None) -> Any:
        """Return the object of one rank. Collective: a broadcast of an object.

        Args:
            own: The object of this rank.
            number: The global rank in ``group``; the first one, of meshes too, if absent.
        """
        box, source = [own], 0 if number is None else self.numbers.index(number)
        for group in self.groups:  # after k axes, all ranks that begin like the first have it
            with naming_failures(self.doing):
                dist.broadcast_object_list(box, group=group, group_src=source)
        return box[0]

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep the text of an exception in the context for :meth:`agree` or :meth:`go_on`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (any error)
            self.failure = f"{type(error).__name__}: {error}"

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Send an exception in the context to all ranks, in place of their next :meth:`agree`.

        Raises:
            Exception: The exception, if it is the same on all ranks.
            ShardError: On all ranks, if it is not the same.

        Collective: none, except that of ``agree`` if it raises.
        """
        try:
            yield
        except Exception as error:
            with self.noting_failure():
                raise
            self.agree(refusal=error)

    def agree(
        self, *facts: str, what: str = "", remedy: str = "", refusal: Exception | None = None
    ) -> None:
        """Raise on all ranks if a rank has failed, or if their facts differ.

        Args:
            facts: Facts that must be the same on all ranks.
            what: The subject of the facts, for messages.
            remedy: The end of the message if a rank has failed.
            refusal: The exception to raise instead if all ranks have failed in the same way.

        Raises:
            ShardError: On all ranks, with the failure of the first rank that has failed.
            RankMismatchError: On all ranks, with the first difference from the first rank.

        Collective: an all-gather of a small object; a second one before it raises.
        """
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        answers = self.gather((self.failure, self.doing, digest))
        if refusal is not None and {failure for failure, *_ in answers.values()} == {self.failure}:
            raise refusal
        for rank, (failure, doing, _) in answers.items():
            if failure is not None:
                raise ShardError(
                    f"Expected no failure while {doing}, got on rank {rank}: {failure}{remedy}"
                )
        if len({digest for *_, digest in answers.values()}) > 1:
            facts_of = self.gather(list(facts))
            raise RankMismatchError(first_difference([*facts_of.values()], [*facts_of], what))

    def on_first(self, act: Callable[[], object]) -> None:
        """Act on the first rank; a failure raises on all ranks, see :meth:`agree`."""
        if self.is_first:
            with self.noting_failure():
                act()
        self.agree()

    def go_on(self) -> None:
        """Raise ``ShardError`` on all ranks if a rank has failed; cheaper than :meth:`agree`.

        Collective: 8 bytes; an all-gather of a small object before it raises.
        """
        if self.say(self.failure is not None):
            self.agree()

    def leave(self, reason: str) -> None:
        """Make the next :meth:`go_on` of the other ranks raise. Collective: that of ``go_on``."""
        self.failure = reason
        with contextlib.suppress(ShardError):
            self.go_on()


@contextlib.contextmanager
def naming_failures(doing: str) -> Iterator[None]:
    """Name the operation if a collective within fails.

    Raises:
        CommunicationError: If a collective fails.
    """
    try:
        yield
    except (torch.OutOfMemoryError, ShardError):
        raise
    except RuntimeError as error:
        raise with_op(error, doing) from error
