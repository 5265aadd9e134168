"""Which groups are reduced, in which order: the reverse of forward, on all ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composable_shard.core.group import ParamGroup
from composable_shard.core.passes.in_flight import InFlight

if TYPE_CHECKING:
    from composable_shard.core.passes.context import Context


class Reductions:
    """The reductions that the groups of one tree are to make.

    A group that ran forward is reduced, or accumulated where gradients are not synchronized, when
    it is complete and its turn has come.

    Attributes:
        is_last: Whether the end of a backward waits for the reductions.
        in_flight: The reductions under way, perhaps with those of other trees.
    """

    def __init__(self, context: Context) -> None:
        self.is_last = True
        self.in_flight = InFlight()
        self._context = context
        self._expected: dict[ParamGroup, None] = {}  # ran forward, by when they were entered
        self._complete: set[ParamGroup] = set()
        self._owing: set[ParamGroup] = set()  # accumulated without sync
        self._unreplicated: dict[ParamGroup, None] = {}  # reduced over shards, not over replicas
        self._limit: int | None = None  # reductions under way at once, while a backward runs

    @property
    def is_left_open(self) -> bool:
        """Whether the end of a backward leaves reductions under way."""
        return not self.is_last or self._context.root.settings.finalizes_by_hand

    @property
    def owing(self) -> list[ParamGroup]:
        """The groups that accumulated without sync and were not reduced since.

        In an order that is the same on all ranks, though they may have been done in another.
        """
        return [group for group in self._context.groups if group in self._owing]

    def expect(self, group: ParamGroup) -> None:
        """Note that ``group`` is to take a turn, after those that were entered later.

        So is a frozen one, though it reduces nothing: others wait until it has been gathered where
        it was needed, so that all ranks do both in the same order.
        """
        self._expected.setdefault(group)

    def forget(self, group: ParamGroup) -> None:
        """Expect no turn of ``group``."""
        self._expected.pop(group, None)

    def complete(self, group: ParamGroup) -> None:
        """Note that the gradients of ``group`` are complete; without sync, accumulate them."""
        if group.settings.requires_gradient_sync:
            self._complete.add(group)
        else:
            self._accumulate(group)

    def launch_in_order(self) -> None:
        """Reduce the groups whose turn it is, as far as they are complete."""
        while self._expected:
            group = next(reversed(self._expected))
            if group not in self._complete:
                return
            self._launch(group)

    def end_backward(self) -> None:
        """Reduce what is left at the end of a backward, and what is owed; wait, if it is the last.

        Collective: a reduction of each group that ran forward or owes, but those without sync; of
        the others that are not averaged over replicas yet, but are to be.
        """
        for group in [*reversed(list(self._expected)), *self.owing]:
            if group.settings.requires_gradient_sync:
                self._launch(group)
            elif group in self._expected:
                self._accumulate(group)
        self._launch_unreplicated()
        if not self.is_left_open:
            self.in_flight.wait()

    def settle(self) -> None:
        """Reduce what backwards have left, without another; wait, if that was the last.

        Collective: a reduction of each group that ran forward or owes, but those without sync.
        """
        for group in dict.fromkeys([*reversed(self._expected), *self.owing]):
            self.complete(group)
            if group in self._complete:
                self._launch(group)
        if not self.is_left_open:
            self.in_flight.wait()

    def finalize(self) -> None:
        """Launch the reductions that are owed and are to be made; leave what is still to come.

        Collective: a reduction of each group that owes, but those without sync; of the others that
            are not averaged over replicas yet, but are to be.
        """
        for group in self.owing:
            if group.settings.requires_gradient_sync:
                self._launch_beside(group)
        self._launch_unreplicated()
        self._limit = None

    def synchronize(self) -> None:
        """Reduce over all ranks what is not, whatever is set; wait. Collective: see settle.

        A backward that is still to come of forwards so far finds them expected as before.
        """
        left = [*reversed(self._expected), *self.owing, *reversed(self._unreplicated)]
        for group in dict.fromkeys(left):
            reduction = group.settings.reduction
            before, reduction.all_reduces = reduction.all_reduces, True
            self._launch_beside(group)
            self.in_flight.leave_room(1)
            reduction.all_reduces = before
        self.in_flight.wait()

    def forget_forwards(self) -> None:
        """Expect nobody any more."""
        self._expected.clear()

    def abandon(self) -> None:
        """Forget the reductions of a backward that failed."""
        self.in_flight.drop(self._context.groups)

    def reset(self) -> None:
        """Forget what was complete in a backward that has ended."""
        self._limit = None
        self._complete.clear()
        self.forget_forwards()

    def _accumulate(self, group: ParamGroup) -> None:
        self._expected.pop(group, None)
        self._owing.add(group)
        self._context.emit("accumulate", group)
        group.gradients.accumulate()

    def _launch_unreplicated(self) -> None:
        for group in list(reversed(self._unreplicated)):
            if group.settings.reduction.all_reduces and group.settings.requires_gradient_sync:
                self._launch_beside(group)

    def _launch_beside(self, group: ParamGroup) -> None:
        """Reduce ``group`` outside of its turn, which is still to come if it is expected."""
        expected = self._expected.copy()
        self._launch(group)
        self._expected = expected

    def _launch(self, group: ParamGroup) -> None:
        self._expected.pop(group, None)
        self._owing.discard(group)
        self._complete.discard(group)
        if not group.is_trainable:
            return
        if self._limit is None:
            self._limit = max(g.settings.max_reductions for g in self._context.groups)
        self.in_flight.leave_room(self._limit)
        self._context.check_order("reduction", group)
        if group.settings.reduction.all_reduces:
            self._unreplicated.pop(group, None)
        elif any(mesh.num_replicas > 1 for mesh in group.channels):
            self._unreplicated[group] = None
        self._context.note("begin_reduce_scatter", group)
        group.gradients.reduce()
        self.in_flight.add(group)
