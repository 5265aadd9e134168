"""Hybrid sharding: averages reduced shards over the replicas of a shard. Imports plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composable_shard.core_next.plugins import Feature, Op, Phase


class Replicas(Feature):
    """Averages reduced shards, and their flags, over the replicate axis of a mesh."""

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return one all-reduce for each reduced buffer on a hybrid mesh."""
        if phase != "deliver":
            return ()
        reductions = group.program.reductions
        return [one.average_over_replicas for one in reductions if one.num_replicas > 1]


class AllReduceHook(Feature):
    """Calls the hooks that users have set with each buffer of reduced gradients."""

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return one call for each reduced buffer of a group with a hook."""
        if phase != "deliver" or group.settings.all_reduce_hook is None:
            return ()
        return [one.call_hook for one in group.program.reductions]
