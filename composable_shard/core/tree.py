"""What a group knows of the tree that it is part of: who listens, what is checked before it starts.

Ranks that call different collectives, or the same ones in different order, wait for each other
until the process group's time-out, and nothing says which group it was. With
``COMPOSABLE_SHARD_CHECK=1`` in the environment of all ranks, they exchange a number before every
gather and reduction and at the end of every forward and backward: ranks that disagree raise the
same error.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from composable_shard.core.transport.pending import Waitable
from composable_shard.core.transport.process_groups import compare
from composable_shard.errors import RankMismatchError
from composable_shard.mesh import ShardMesh

# Comparing with the other ranks what comes next, for the one who hunts a hang ---------------------

CHECK_VARIABLE = "COMPOSABLE_SHARD_CHECK"


class OrderCheck:
    """Compares what the ranks of a tree are about to do."""

    def __init__(self) -> None:
        self._count = 0

    def agree(self, what: str, meshes: Iterable[ShardMesh]) -> None:
        """Raise on all ranks if some of them do not come to ``what`` now.

        Raises:
            RankMismatchError: On all ranks, with what each of two does; on those that wait, if
                another does not come within the time-out.

        Collective: one all-reduce of 16 bytes for each process group of more than one rank; more
            only if it raises.
        """
        self._count += 1
        for mesh in meshes:
            for ranks in mesh.process_groups:
                self._compare(what, ranks, mesh.device)

    def _compare(self, what: str, ranks: dist.ProcessGroup, device: torch.device) -> None:
        try:
            is_same, _ = compare(what, ranks, device)
        except RuntimeError as error:
            raise RankMismatchError(
                f"Expected all ranks to come to the {what}, step {self._count}, got none of "
                "some rank within the time-out; it has ended, or waits elsewhere"
            ) from error
        if not is_same:
            self._raise_difference(what, ranks)

    def _raise_difference(self, what: str, ranks: dist.ProcessGroup) -> None:
        heard: list[Any] = [None] * ranks.size()
        dist.all_gather_object(heard, what, group=ranks)
        numbers = dist.get_process_group_ranks(ranks)
        other = next(place for place, theirs in enumerate(heard) if theirs != heard[0])
        raise RankMismatchError(
            f"Expected the same order of collectives on all ranks, got at step {self._count} on "
            f"rank {numbers[0]}: {heard[0]}; on rank {numbers[other]}: {heard[other]}"
        )


# What a group knows of its tree -------------------------------------------------------------------

Listener = Callable[[str, str], None]
Group = TypeVar("Group")


class Tree(ABC, Generic[Group]):
    """What the groups below one root share, as far as each of them asks for it.

    Args:
        groups: All groups, the root first, in the order of ``named_modules``.

    Attributes:
        groups: All groups, the root first.
        root: The group of the outermost sharded module.
        listener: Called with ``(event, group name)`` and ``(moment, group name)``, if set.
        order_check: Compares with the other ranks what comes next, if the environment asks for it.
        is_agreed: Whether it is known that all ranks hold the same model.
        post_optim_event: What the next gather waits for besides the compute stream.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.root = self.groups[0]
        self.listener: Listener | None = None
        is_asked_for = os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")
        self.order_check = OrderCheck() if is_asked_for else None
        self.is_agreed = False
        self.post_optim_event: Waitable | None = None

    def wait_for_optimizer(self) -> None:
        """Wait for the end of an optimizer step that runs beside, if that was asked for.

        Hazard: a stream takes an event of another kind for one that was never recorded, and does
        not wait. Guard: the event is asked, which knows its kind.
        """
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()

    @abstractmethod
    def agree(self) -> None:
        """Check, before the first gather, that all ranks hold the same model. Collective."""

    @abstractmethod
    def is_in_backward(self, group: Group) -> bool:
        """Tell whether the backward that is running, of whatever tree, goes through ``group``."""

    @abstractmethod
    def note_new_params(self, group: Group) -> None:
        """Have ``group``, of which parameters are new, told of optimizer steps on them."""

    @abstractmethod
    def show_sharded(self) -> None:
        """Register the sharded parameters, which an optimizer has changed, but while computing."""
