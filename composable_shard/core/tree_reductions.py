"""The reductions of one tree: not begun, as there was no sync; launched; waited for."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence

from composable_shard.core.group import ParamGroup
from composable_shard.core.transport import host
from composable_shard.errors import ShardError

# Reductions that are launched and not waited for --------------------------------------------------


class InFlight:
    """The reductions under way, the oldest first; of one tree, or of several that share them.

    Each holds the gradients of its group, so there is a bound on how many there are. Those over the
    replicas hold shards only, and are waited for at the end; those of shards that go to the host
    one behind the other, as the device has no room for all, and copies take their time. Where there
    are streams, they are launched with those over the shards, and begin behind them.

    Attributes:
        groups: Whose reductions over the shards are under way.
        all_reducing: Whose reductions over the replicas are under way.
        returning: Whose results are on their way to the host.
    """

    def __init__(self) -> None:
        self.groups: deque[ParamGroup] = deque()
        self.all_reducing: deque[ParamGroup] = deque()
        self.returning: list[ParamGroup] = []

    def add(self, group: ParamGroup) -> None:
        """Note that the reduction of ``group`` has been launched."""
        self.groups.append(group)
        group.emit("reduce_scatter")
        if group.gradients.is_all_reducing:
            group.emit("all_reduce")

    def leave_room(self, limit: int) -> None:
        """Wait for the oldest until another makes no more than ``limit``."""
        while len(self.groups) >= limit:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Wait for all."""
        self.leave_room(1)
        self.wait_for_replicas()

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
            if group in self.all_reducing:
                self.all_reducing.remove(group)

    def take_over(self, other: InFlight) -> None:
        """Add what another tree has launched, which from now on shares this."""
        self.groups.extend(other.groups)
        self.all_reducing.extend(other.all_reducing)
        self.returning += other.returning

    def _wait_for_oldest(self) -> None:
        """Wait for a reduction over the shards; let that over the replicas overlap what follows."""
        group = self.groups.popleft()
        self._wait(group, "reduce_scatter")
        was_launched = group.gradients.is_all_reducing
        if group.gradients.start_all_reduce():
            group.emit("wait_for_reduce_scatter")
            if not was_launched:
                group.emit("all_reduce")
            if group in self.all_reducing:  # of a backward that was not the last; it is finished
                self.all_reducing.remove(group)
            self.all_reducing.append(group)
            while len(self.all_reducing) > 1 and self.all_reducing[0].gradients.go_to_host:
                self._wait_for_oldest_over_replicas()
        else:
            self._return(group)
            group.emit("wait_for_reduce_scatter")

    def wait_for_replicas(self) -> None:
        """Wait for the reductions over the replicas."""
        while self.all_reducing:
            self._wait_for_oldest_over_replicas()

    def _wait_for_oldest_over_replicas(self) -> None:
        group = self.all_reducing.popleft()
        self._wait(group, "all_reduce")
        self._return(group)
        group.emit("wait_for_all_reduce")

    def _return(self, group: ParamGroup) -> None:
        if group.gradients.start_return():
            self.returning.append(group)

    def _wait(self, group: ParamGroup, stage: str) -> None:
        group.emit(f"begin_wait_for_{stage}")
        group.gradients.wait()
        group.emit(f"waited_for_{stage}")


# What the groups of one tree have to reduce: launched, accumulated without sync, in flight --------


class Reductions:
    """The reductions that the groups of one tree are to make.

    Args:
        groups: All groups, the root first.

    Attributes:
        groups: All groups, the root first.
        is_last: Whether the end of a backward waits for the reductions.
        by_hand: Whether a call finishes the reductions of the backwards that have begun; ``None``
            if none has begun that is not finished.
        handle: What waits for the reductions that such a call has launched, if any.
        in_flight: The reductions under way, perhaps with those of other trees.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.is_last = True
        self.by_hand: bool | None = None
        self.handle: object | None = None
        self.in_flight = InFlight()
        self.groups = groups
        self._root = groups[0]
        self._unsynced: set[ParamGroup] = set()
        self._unreplicated: dict[ParamGroup, None] = {}  # reduced over shards, not over replicas
        self._limit: int | None = None  # reductions under way at once, while a backward runs
        self._launched: set[ParamGroup] = set()  # by the backward that runs, or has failed

    @property
    def unsynced(self) -> list[ParamGroup]:
        """The groups that accumulated without sync and were not reduced since.

        In an order that is the same on all ranks, though they may have been done in another.
        """
        return [group for group in self.groups if group in self._unsynced]

    @property
    def unreplicated(self) -> list[ParamGroup]:
        """The groups that are reduced over shards and not over replicas, in the order in which."""
        return list(self._unreplicated)

    def take_over(self, other: Reductions) -> None:
        """Go on with those of another tree, which is a part of this one from now on."""
        if self.in_flight is not other.in_flight:
            self.in_flight.take_over(other.in_flight)
        self._unsynced.update(other.unsynced)
        self._unreplicated.update(dict.fromkeys(other.unreplicated))
        self.is_last = self.is_last and other.is_last
        self.by_hand = other.by_hand if self.by_hand is None else self.by_hand
        self.handle = other.handle if self.handle is None else self.handle

    @property
    def are_to_go_on(self) -> bool:
        """Whether the next backward adds to the gradients of the last, as far as is known."""
        is_open = self.by_hand or not (self.is_last or self._root.settings.finalizes_by_hand)
        return is_open or bool(self._unsynced) or bool(self._unreplicated)

    @property
    def is_left_open(self) -> bool:
        """Whether the end of a backward leaves reductions under way."""
        return not self.is_last or self._root.settings.finalizes_by_hand

    def begin_backward(self) -> None:
        """Go on with what an earlier backward has left, where this one would do it in disorder.

        Hazard: a group that accumulates finishes its reduction first, and when it does so depends
        on the rank; so would the order of reductions over the replicas. Guard: they are all
        launched before. Test: ``test_what_is_in_flight_goes_on_before_a_group_accumulates``.

        Collective: an all-reduce of each group that is reduced over the shards only, or none.
        """
        self._launched.clear()
        if any(not group.settings.requires_gradient_sync for group in self.in_flight.groups):
            self.in_flight.leave_room(1)

    def accumulate(self, group: ParamGroup) -> None:
        """Add the gradients of ``group`` to those that a later backward reduces."""
        if group.gradients.are_to_reduce:
            self._unsynced.add(group)
        group.emit("accumulate")
        with group.streams.where_used():
            group.gradients.accumulate()

    def launch(self, group: ParamGroup) -> None:
        """Launch the reduction of ``group`` in its turn, if it has trainable parameters.

        One that was frozen after it had accumulated waits for the end of the backward: its turn may
        come on some ranks only, as that of a frozen group depends on its inputs.

        Collective: one reduce-scatter for each mesh and dtype of reduction.
        """
        if group.is_trainable:
            self._reduce(group)

    def launch_at_end(self, group: ParamGroup) -> None:
        """Launch the reduction of ``group`` if it has anything to reduce. Collective: the same."""
        if group.gradients.are_to_reduce:
            self._reduce(group)

    def _reduce(self, group: ParamGroup) -> None:
        self._unsynced.discard(group)
        if self._limit is None:
            self._limit = max(g.settings.max_reductions for g in self.groups)
        self.in_flight.leave_room(self._limit)
        group.check_order("reduction")
        if group.settings.reduction.all_reduces:
            self._unreplicated.pop(group, None)
        elif group.gradients.have_replicas:
            self._unreplicated[group] = None
        group.emit("begin_reduce_scatter")
        with group.streams.where_used():
            group.gradients.reduce()
        self.in_flight.add(group)
        self._launched.add(group)

    def end_backward(self) -> None:
        """Reduce what earlier backwards left; wait, if this one is the last.

        Collective: see launch_left.
        """
        self.launch_left()
        self.wait_unless_open()

    def wait_unless_open(self) -> None:
        """Wait for all reductions, unless backwards are to leave them under way."""
        if not self.is_left_open:
            self.in_flight.wait()
            self.by_hand = None

    def launch_left(self) -> None:
        """Launch the reductions of what backwards left, as far as is set.

        Collective: a reduction of each group that was not synchronized, but is to be; of the others
        that are not averaged over replicas yet, but are to be; of those that nobody ran, where they
        get zeros.
        """
        left = dict.fromkeys([*self.unsynced, *reversed(self._unreplicated)])
        for group in self.groups:
            is_unused = group.settings.reduction.fills_unused and group not in self._launched
            if is_unused and any(param.unsharded is not None for param in group.params):
                left[group] = None
        for group in left:
            is_held = group in self._unreplicated and group not in self._unsynced
            is_left = not is_held or group.settings.reduction.all_reduces
            if is_left and group.settings.requires_gradient_sync:
                self.launch_at_end(group)

    def synchronize(self, ran: Iterable[ParamGroup]) -> None:
        """Reduce over all ranks what is not, whatever is set; wait.

        Args:
            ran: Groups that may have gradients besides, the same on all ranks.

        Collective: a reduction of each of them, and of those that are not synchronized or not
            averaged over replicas.
        """
        for group in dict.fromkeys([*ran, *self.unsynced, *reversed(self._unreplicated)]):
            reduction = group.settings.reduction
            before, reduction.all_reduces = reduction.all_reduces, True
            try:
                self.launch_at_end(group)
                self.in_flight.leave_room(1)
            finally:
                reduction.all_reduces = before
        self.in_flight.wait()

    def wait_for_copies(self) -> None:
        """Wait until what is on its way between host and device is there, gradients too."""
        if host.is_busy():
            self._root.emit("begin_wait_for_copies")
            host.settle()
            self._root.emit("wait_for_copies")
        self.in_flight.end_returns()

    def finish_earlier(self) -> None:
        """Finish what backwards have launched that did not fail, and left under way.

        Where that is not possible, the next collective says why. Collective: none, or the
        all-reduces over the replicas of what is reduced over the shards.
        """
        under_way = self.in_flight
        for group in [*under_way.all_reducing, *under_way.groups, *under_way.returning]:
            if group in self.groups and group not in self._launched:
                with contextlib.suppress(ShardError, RuntimeError):
                    group.gradients.finish()

    def abandon(self) -> None:
        """Forget the reductions of a backward that failed."""
        self.in_flight.drop(self.groups)
        self.by_hand = self.handle = None

    def reset(self) -> None:
        """End a backward: ask anew at the next one how many reductions may be under way."""
        self._limit = None
        self._launched.clear()
