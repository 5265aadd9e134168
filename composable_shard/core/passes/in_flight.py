"""Reductions that are launched and not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from composable_shard.core.group import ParamGroup


class InFlight:
    """The reductions under way, the oldest first; of one tree, or of several that share them.

    Each holds the gradients of its group, so there is a bound on how many there are. The reduction
    over the replicas of a group overlaps the next one over shards.

    Attributes:
        groups: Whose reductions over the shards are under way.
        returning: Whose results may be on their way to the host.
    """

    def __init__(self) -> None:
        self.groups: deque[ParamGroup] = deque()
        self._all_reducing: ParamGroup | None = None
        self.returning: list[ParamGroup] = []

    def add(self, group: ParamGroup) -> None:
        """Note that the reduction of ``group`` has been launched."""
        self.groups.append(group)
        group.context.emit("reduce_scatter", group)

    def leave_room(self, limit: int) -> None:
        """Wait for the oldest until another makes no more than ``limit``."""
        while len(self.groups) >= limit:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Wait for all."""
        self.leave_room(1)
        self._wait_for_replicas()

    def end_returns(self) -> None:
        """Put on the sharded parameters what was on its way to the host."""
        while self.returning:
            self.returning.pop(0).gradients.end_return()

    def drop(self, groups: Iterable[ParamGroup]) -> None:
        """Forget the reductions of ``groups``, whose backward failed."""
        for group in groups:
            if group in self.groups:
                self.groups.remove(group)
            if group in self.returning:
                self.returning.remove(group)
            if group is self._all_reducing:
                self._all_reducing = None

    def take_over(self, other: InFlight) -> None:
        """Add what another tree has launched, which from now on shares this."""
        self.groups.extend(other.groups)
        self.returning += other.returning

    def _wait_for_oldest(self) -> None:
        """Wait for a reduction over the shards; let that over the replicas overlap what follows."""
        group = self.groups.popleft()
        self._wait(group, "reduce_scatter")
        if group.gradients.start_all_reduce():
            group.context.emit("wait_for_reduce_scatter", group)
            group.context.emit("all_reduce", group)
            self._wait_for_replicas()
            self._all_reducing = group
        else:
            self._return(group)
            group.context.emit("wait_for_reduce_scatter", group)

    def _wait_for_replicas(self) -> None:
        group, self._all_reducing = self._all_reducing, None
        if group is not None:
            self._wait(group, "all_reduce")
            self._return(group)
            group.context.emit("wait_for_all_reduce", group)

    def _return(self, group: ParamGroup) -> None:
        group.gradients.start_return()
        self.returning.append(group)

    def _wait(self, group: ParamGroup, stage: str) -> None:
        group.context.note(f"begin_wait_for_{stage}", group)
        group.gradients.wait()
        group.context.note(f"waited_for_{stage}", group)
