"""The features that observe a step: events for a listener, and a check of the execution order.

Imports plugins. If ranks call different collectives, or the same ones in different orders, they
wait for each other until the time-out of the process group, and no message names the parameter
group. With ``COMPOSABLE_SHARD_CHECK=1`` in the environment of all ranks, they compare their next
operation before every gather and reduction, and at the end of every forward and backward. If these
differ, all ranks raise the same error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from composable_shard.core.plugins import Feature, Op, Phase
from composable_shard.core.transport.process_groups import compare
from composable_shard.errors import RankMismatchError

# Events for a listener ----------------------------------------------------------------------------

Listener = Callable[[str, str], None]
"""A function that gets an event, such as ``all_gather``, and the name of a group."""

_EVENTS: dict[Phase, tuple[str, ...]] = {
    "pre_forward": ("pre_forward",),
    "gather": ("begin_all_gather",),
    "regather": ("begin_regather",),
    "gather_launched": ("all_gather",),
    "before_wait_for_gather": ("begin_wait_for_all_gather",),
    "gather_done": ("waited_for_all_gather", "wait_for_all_gather"),
    "freed": ("reshard",),
    "post_forward": ("post_forward",),
    "pre_backward": ("pre_backward",),
    "accumulated": ("accumulate",),
    "reduce": ("begin_reduce_scatter",),
    "reduce_launched": ("reduce_scatter",),
    "before_wait_for_reduction": ("begin_wait_for_reduce_scatter",),
    "averaged": ("waited_for_reduce_scatter",),
    "reduced_over_shards": ("wait_for_reduce_scatter",),
    "all_reduce_launched": ("all_reduce",),
    "before_wait_for_all_reduce": ("begin_wait_for_all_reduce",),
    "delivered": ("wait_for_reduce_scatter",),
    "replicas_delivered": ("waited_for_all_reduce", "wait_for_all_reduce"),
    "post_backward": ("post_backward",),
}


class Trace(Feature):
    """Calls a function with every event.

    Attributes:
        listener: The function. Compiled programs call the current one.
    """

    listener: Listener | None = None

    def _emit(self, event: str, name: str) -> None:
        if self.listener is not None:
            self.listener(event, name)

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return a call for each event of the phase."""
        return [partial(self._emit, event, group.name) for event in _EVENTS.get(phase, ())]


# The order of collectives on all ranks ------------------------------------------------------------

CHECK_VARIABLE = "COMPOSABLE_SHARD_CHECK"

_CHECKED: dict[Phase, str] = {
    "gather": "all-gather",
    "regather": "all-gather",
    "reduce": "reduction",
}


def order_checks() -> list[Feature]:
    """Return a new check in a list; an empty list if the environment variable is not set."""
    return [OrderCheck()] if os.environ.get(CHECK_VARIABLE, "0") not in ("", "0") else []


class OrderCheck(Feature):
    """Compares the next operation of all ranks of a tree."""

    def __init__(self) -> None:
        self._num_steps = 0

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return a comparison before a gather or a reduction is launched."""
        return [partial(self.agree, _CHECKED[phase], group)] if phase in _CHECKED else ()

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Compare at the end of a forward."""
        self.agree("end of a forward", outermost)

    def end_backward(self, tree: Any) -> None:
        """Compare at the end of a backward."""
        self.agree("end of a backward", tree.root)

    def agree(self, op: str, group: Any) -> None:
        """Raise on all ranks unless all have reached the operation ``op`` of a group.

        Raises:
            RankMismatchError: On all ranks, with the operations of two ranks that differ; only on
                the waiting ranks, if another rank does not arrive within the time-out.

        Collective: one all-reduce of 16 bytes for each process group of more than one rank; more
            only if it raises.
        """
        self._num_steps += 1
        for mesh in group.channels:
            for ranks in mesh.process_groups:
                self._compare(f"{op} of {group.label}", ranks, mesh.device)

    def _compare(self, op: str, ranks: dist.ProcessGroup, device: torch.device) -> None:
        try:
            is_same, _ = compare(op, ranks, device)
        except RuntimeError as error:
            raise RankMismatchError(
                f"Expected all ranks to reach the {op}, step {self._num_steps}, got no sign of "
                "some rank within the time-out; it has ended, or waits elsewhere"
            ) from error
        if not is_same:
            self._raise_difference(op, ranks)

    def _raise_difference(self, op: str, ranks: dist.ProcessGroup) -> None:
        ops: list[Any] = [None] * ranks.size()
        dist.all_gather_object(ops, op, group=ranks)
        numbers = dist.get_process_group_ranks(ranks)
        other = next(rank for rank, other_op in enumerate(ops) if other_op != ops[0])
        raise RankMismatchError(
            f"Expected the same order of collectives on all ranks, got at step {self._num_steps} "
            f"on rank {numbers[0]}: {ops[0]}; on rank {numbers[other]}: {ops[other]}"
        )
