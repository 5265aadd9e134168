"""Calls a function with every event of a tree. Imports plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from composable_shard.core.plugins import Feature, Op, Phase

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
        hear: The function. Programs that were compiled with an earlier one call it too.
    """

    hear: Listener | None = None

    def _tell(self, event: str, name: str) -> None:
        if self.hear is not None:
            self.hear(event, name)

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return a call for each event of the phase."""
        return [partial(self._tell, event, group.name) for event in _EVENTS.get(phase, ())]
