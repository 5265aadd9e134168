"""Hooks of users that see the reduced gradients. Imports plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composable_shard.core_next.plugins import Feature, Op, Phase


class AllReduceHook(Feature):
    """Calls the hooks that users have set with each buffer of reduced gradients."""

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return one call for each reduced buffer of a group with a hook."""
        if phase != "deliver" or group.settings.all_reduce_hook is None:
            return ()
        return [one.call_hook for one in group.program.reductions]
