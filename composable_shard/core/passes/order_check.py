"""Comparing with the other ranks what comes next, for the one who hunts a hang.

Ranks that call different collectives, or the same ones in different order, wait for each other
until the process group's time-out, and nothing says which group it was. With
``COMPOSABLE_SHARD_CHECK=1`` in the environment of all ranks, they exchange a number before every
collective and at the end of every forward and backward: ranks that disagree raise the same error.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from composable_shard.errors import RankMismatchError

if TYPE_CHECKING:
    from composable_shard.core.group import ParamGroup

VARIABLE = "COMPOSABLE_SHARD_CHECK"


def is_asked_for() -> bool:
    """Tell whether the environment asks for the check."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


class OrderCheck:
    """Compares what the ranks of a tree are about to do."""

    def __init__(self) -> None:
        self._count = 0

    def agree(self, group: ParamGroup, act: str) -> None:
        """Raise on all ranks if some of them do not come to ``act`` of ``group`` now.

        Raises:
            RankMismatchError: On all ranks, with what each of two does; on those that wait, if
                another does not come within the time-out.

        Collective: one all-reduce of 16 bytes for each process group of more than one rank; more
            only if it raises.
        """
        self._count += 1
        what = f"{act} of {group.label}"
        for mesh in group.channels:
            for ranks in (mesh.shard_group, mesh.replica_group):
                if ranks is not None and ranks.size() > 1:
                    self._compare(what, ranks, mesh.device)

    def _compare(self, what: str, ranks: dist.ProcessGroup, device: torch.device) -> None:
        digest = hashlib.sha256(what.encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        extremes = torch.tensor([number, -number], device=device)
        try:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=ranks)
            largest, negated_smallest = extremes.tolist()
        except RuntimeError as error:
            raise RankMismatchError(
                f"Expected all ranks to come to the {what}, step {self._count}, got none of "
                "some rank within the time-out; it has ended, or waits elsewhere"
            ) from error
        if largest != -negated_smallest:
            self._raise_difference(what, ranks)

    def _raise_difference(self, what: str, ranks: dist.ProcessGroup) -> None:
        heard: list[Any] = [None] * ranks.size()
        dist.all_gather_object(heard, what, group=ranks)
        first = heard[0]
        rank = next(rank for rank, theirs in enumerate(heard) if theirs != first)
        raise RankMismatchError(
            f"Expected the same order of collectives on all ranks, got at step {self._count} on "
            f"rank 0: {first}; on rank {rank}: {heard[rank]}"
        )
