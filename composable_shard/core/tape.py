"""PURE (without torch): the record of forward calls, and the plans made from it.

The tape has a visit for each call of a group's module (`group.py`) that may have a backward. From
the visits comes the plan of a backward: the steps that gather and finish groups (`backward.py`).
The order of groups in the last forward predicts which group the current forward gathers next. All
ranks run the same forward, so their tapes agree, even if their losses reach different parts of the
graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from operator import attrgetter, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

Group = TypeVar("Group", bound=Hashable)


class Interval:
    """The entry and exit times of a call. All calls inside one checkpoint share an interval.

    Times count the entries and exits of calls on the tape. A checkpoint recomputes all of its calls
    before the backward of any of them. So backward gathers their groups where forward left the
    checkpoint, and finishes them where forward entered it.
    """

    def __init__(self, entered: int, *, is_checkpoint: bool) -> None:
        self.entered = self.exited = entered
        self.is_checkpoint = is_checkpoint


class Visit(Generic[Group]):
    """One call of a group's module in a forward that may have a backward."""

    def __init__(self, group: Group, interval: Interval, entered: int) -> None:
        self.group = group
        self.interval = interval
        self.entered = entered  # the entry time of this call itself, even inside a checkpoint
        # Whether backward may read the parameters that this call used; `Tape.leave` sets this.
        self.backward_may_read = False


class PlanStep(NamedTuple, Generic[Group]):
    """One step of the plan of a backward: gather a group, or finish (free and reduce) it."""

    group: Group
    is_gather: bool


class Plan(NamedTuple, Generic[Group]):
    """The plan of a backward, the same on all ranks.

    Attributes:
        steps: The steps in reverse order of execution.
        groups: The groups that the plan gathers and finishes.
        num_recomputes: For each group inside checkpoints, the number of calls to recompute.
    """

    steps: list[PlanStep[Group]]
    groups: set[Group]
    num_recomputes: dict[Group, int]


NO_PLAN: Plan[Any] = Plan([], set(), {})


class CallRecord(NamedTuple, Generic[Group]):
    """One call in a forward. On a rank that skips a module, ``sit_out`` replays such calls.

    Attributes:
        depth: The number of calls around this call.
        group: The group.
        module: The called module of the group.
        interval: The interval of its visit; ``None`` if the call cannot have a backward.
        has_grad: Whether gradients were enabled during the call; a reentrant checkpoint disables
            them.
        needs_grad: Whether an output may get a gradient.
    """

    depth: int
    group: Group
    module: Hashable
    interval: Interval | None
    has_grad: bool
    needs_grad: bool


class Tape(Generic[Group]):
    """The visits of all forwards since the last backward.

    Attributes:
        visits: The visits in order of entry.
        calls: The fields of a `CallRecord` for each call of this forward, in order of exit.
        last_calls: The ``calls`` of the last forward for each outermost module, separately for
            forwards that may have a backward (key ``True``). The latest forward comes last.
        upcoming: The group that forward probably needs next.
    """

    def __init__(self) -> None:
        self.visits: list[Visit[Group]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.last_calls: dict[tuple[Hashable, bool], list[tuple[Any, ...]]] = {}
        self._clock = self._began = 0  # the time now, and when the latest forward began
        self._any_grad = False  # whether `leave` got a true flag in this forward
        # For each outermost group, the order of groups in its last forward.
        self._orders: dict[Group, list[Group]] = {}
        self._predicted_order: list[Group] = []
        self._current_order: list[Group] = []
        self._first_of_backward: Group | None = None
        self.upcoming: Group | None = None

    # Forward --------------------------------------------------------------------------------

    def begin_forward(self, outermost: Group) -> None:
        """Begin a forward; the last forward with the same ``outermost`` predicts its order."""
        self._began, self._any_grad = self._clock, False
        self._current_order, self.calls, self.upcoming = [], [], None
        self._predicted_order = self._orders.get(outermost, [])
        if self.visits:
            self._forget_superseded()

    def advance(self, group: Group, depth: int = 1) -> Sequence[Group]:
        """Record that forward needs ``group`` now; return the groups that it probably needs next.

        A wrong prediction costs one gather, never correctness.
        """
        index = len(self._current_order)
        self._current_order.append(group)
        predicted = self._predicted_order
        if index < len(predicted) and predicted[index] is group:
            self.upcoming = predicted[index + 1] if index + 1 < len(predicted) else None
            return predicted[index + 1 : index + 1 + depth]
        self.upcoming = None
        return ()

    def is_turning_point(self, group: Group) -> bool:
        """Return whether ``group`` is last in this forward and was first in the last backward.

        If forward freed such a group, the next backward would gather it again at once.
        """
        current, is_first = self._current_order, group is self._first_of_backward
        return is_first and current[-1:] == [group] and len(current) == len(self._predicted_order)

    def was_turning_point(self, outermost: Group, group: Group) -> bool:
        """Return whether ``group`` was last in the last forward and first in the last backward."""
        order = self._orders.get(outermost, [])
        return order[-1:] == [group] and group is self._first_of_backward

    def enter(self, group: Group, checkpoint: Interval | None) -> Visit[Group]:
        """Record the start of a call of ``group``, inside ``checkpoint`` if there is one."""
        self._clock += 1
        interval = checkpoint or Interval(self._clock, is_checkpoint=False)
        visit = Visit(group, interval, self._clock)
        self.visits.append(visit)
        return visit

    def enter_checkpoint(self) -> Interval:
        """Return the interval of a new checkpoint; pass it to `enter` for each call inside."""
        return Interval(self._clock + 1, is_checkpoint=True)

    def leave(self, visit: Visit[Group], *, needs_reduce: bool, needs_grad: bool) -> None:
        """Record the end of a call.

        All ranks need the same plan, but the flags of a call may differ between ranks, for example
        if some ranks detach its input. So once a flag is true in a forward, as in the first call of
        a trained group, backward may read the parameters of this call and of all later calls.

        Args:
            visit: The visit that :meth:`enter` returned.
            needs_reduce: Whether the group has gradients to reduce.
            needs_grad: Whether an output may get a gradient.
        """
        self._clock += 1
        interval = visit.interval
        interval.exited = self._clock
        self._any_grad = self._any_grad or needs_reduce or needs_grad
        visit.backward_may_read = self._any_grad or interval.is_checkpoint

    def end_forward(self, outermost: Group) -> None:
        """End a forward, and keep its order to predict the order of the next forward."""
        self._orders[outermost] = self._current_order
        _, _, module, interval, _, _ = self.calls[-1]  # the outermost call exits last
        self.last_calls.pop((module, interval is not None), None)
        self.last_calls[module, interval is not None] = self.calls

    def discard_forward(self) -> None:
        """Forget the visits of the latest forward, after it has raised."""
        self.visits = [visit for visit in self.visits if visit.entered <= self._began]

    def forget(self, groups: Set[Group], in_progress: Sequence[Visit[Group] | None]) -> None:
        """Forget the visits of groups after their backward, except those in progress."""
        self.visits = [v for v in self.visits if v.group not in groups or v in in_progress]

    def clear(self) -> None:
        """Forget all visits, after their backward."""
        self.visits = []

    def _forget_superseded(self) -> None:
        """Keep only visits that affect the plan: without a backward, visits would pile up."""
        first, last = self._first_and_last()
        checkpoints = [visit for visit in self.visits if visit.interval.is_checkpoint]
        keep = {id(visit) for visit in (*first.values(), *last.values(), *checkpoints)}
        self.visits = [visit for visit in self.visits if id(visit) in keep]

    # Backward -------------------------------------------------------------------------------

    def __contains__(self, group: Group) -> bool:
        return any(visit.group is group for visit in self.visits)

    def plan_backward(self) -> Plan[Group]:
        """Return the plan of a backward through all forwards on the tape; record its first group.

        The plan gathers a group where forward left it for the last time, and finishes it where
        forward entered it for the first time. In between, backward may read its parameters.
        """
        num_recomputes: dict[Group, int] = {}
        for visit in self.visits:
            if visit.interval.is_checkpoint:
                num_recomputes[visit.group] = num_recomputes.get(visit.group, 0) + 1
        first, last = self._first_and_last()
        timed: list[tuple[int, int, PlanStep[Group]]] = []
        for group, visit in last.items():
            start = first[group]
            timed.append((visit.interval.exited, -visit.entered, PlanStep(group, is_gather=True)))
            timed.append((start.interval.entered, start.entered, PlanStep(group, is_gather=False)))
        # The steps run from the last to the first. Groups of one checkpoint have equal times: they
        # are gathered in the order of forward, for the recomputation, and finished in reverse.
        timed.sort(key=itemgetter(0, 1))
        steps = list(map(itemgetter(2), timed))
        self._first_of_backward = steps[-1].group if steps else None
        return Plan(steps, set(last), num_recomputes)

    def _first_and_last(self) -> tuple[dict[Group, Visit[Group]], dict[Group, Visit[Group]]]:
        """Return the first visit of each group by entry, and its last by exit.

        The last visits are only those that backward may read. Visits in one checkpoint exit
        together: of these, the first entered counts as the last.
        """
        # In a dict, the last entry of a group wins. The visits are reversed, so that the earliest
        # is the last entry; the sort keeps the reversed order of visits that exit together.
        visits, group_of = self.visits[::-1], attrgetter("group")
        first = dict(zip(map(group_of, visits), visits, strict=True))
        read = filter(attrgetter("backward_may_read"), visits)
        last = sorted(read, key=attrgetter("interval.exited"))
        return first, dict(zip(map(group_of, last), last, strict=True))
