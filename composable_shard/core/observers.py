"""The features that observe a step: events for a listener, and a check of the execution order.

Imports plugins. Ranks that call different collectives, or the same ones in a different order, wait
for each other until the time-out of the process group, and no message names the parameter group.
With ``COMPOSABLE_SHARD_CHECK=1`` in the environment of all ranks, they exchange a number before
every gather and reduction and at the end of every forward and backward. If the numbers differ, all
ranks raise the same error.
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
"""Called with an event, such as ``all_gather``, and the name of a group."""

_EVENTS: dict[Phase, tuple[str, ...]] = {
    "pre_forward": ("pre_forward",),
    "gather": ("begin_all_gather",),
    "regather": ("begin_regather",),
    "gathered": ("all_gather",),
    "await_gather": ("begin_wait_for_all_gather",),
    "wait": ("waited_for_all_gather", "wait_for_all_gather"),
    "freed": ("reshard",),
    "post_forward": ("post_forward",),
    "pre_backward": ("pre_backward",),
    "accumulated": ("accumulate",),
    "reduce": ("begin_reduce_scatter",),
    "reduced": ("reduce_scatter",),
    "await_reduction": ("begin_wait_for_reduce_scatter",),
    "averaged": ("waited_for_reduce_scatter",),
    "scattered": ("wait_for_reduce_scatter",),
    "all_reduced": ("all_reduce",),
    "await_all_reduce": ("begin_wait_for_all_reduce",),
    "delivered": ("wait_for_reduce_scatter",),
    "replicas_delivered": ("waited_for_all_reduce", "wait_for_all_reduce"),
    "post_backward": ("post_backward",),
}


class Trace(Feature):
    """Calls a function with every event.

    Attributes:
        listener: The function. Compiled programs always call the current one.
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
    """Return a new check, if the environment variable is set."""
    return [OrderCheck()] if os.environ.get(CHECK_VARIABLE, "0") not in ("", "0") else []


class OrderCheck(Feature):
    """Compares the next operation of the ranks of a tree."""

    def __init__(self) -> None:
        self._count = 0

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return a comparison before a gather or a reduction is launched."""
        return [partial(self.agree, _CHECKED[phase], group)] if phase in _CHECKED else ()

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Compare at the end of a forward."""
        self.agree("end of a forward", outermost)

    def end_backward(self, tree: Any) -> None:
        """Compare at the end of a backward."""
        self.agree("end of a backward", tree.root)

    def agree(self, what: str, group: Any) -> None:
        """Raise on all ranks unless all have reached ``what`` of a group.

        Raises:
            RankMismatchError: On all ranks, with the operations of two that differ; only on the
                waiting ranks, if another does not arrive within the time-out.

        Collective: one all-reduce of 16 bytes for each process group of more than one rank; more
            only if it raises.
        """
        self._count += 1
        for mesh in group.channels:
            for ranks in mesh.process_groups:
                self._compare(f"{what} of {group.label}", ranks, mesh.device)

    def _compare(self, what: str, ranks: dist.ProcessGroup, device: torch.device) -> None:
        try:
            is_same, _ = compare(what, ranks, device)
        except RuntimeError as error:
            raise RankMismatchError(
                f"Expected all ranks to reach the {what}, step {self._count}, got no sign of "
                "some rank within the time-out; it has ended, or waits elsewhere"
            ) from error
        if not is_same:
            self._raise_difference(what, ranks)

    def _raise_difference(self, what: str, ranks: dist.ProcessGroup) -> None:
        texts: list[Any] = [None] * ranks.size()
        dist.all_gather_object(texts, what, group=ranks)
        numbers = dist.get_process_group_ranks(ranks)
        other = next(place for place, text in enumerate(texts) if text != texts[0])
        raise RankMismatchError(
            f"Expected the same order of collectives on all ranks, got at step {self._count} on "
            f"rank {numbers[0]}: {texts[0]}; on rank {numbers[other]}: {texts[other]}"
        )
