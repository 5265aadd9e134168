"""The order of execution: what forward entered and left, and the steps of a backward. Pure.

The first pass records who was needed after whom. From the second on, the record says whom to
gather while the present one computes, and whom not to free because it is needed again at once.
A wrong guess costs time, never correctness.

A forward notes where it enters and leaves each group. All ranks run the same forward, so they
derive the same steps from it, whatever part of the graph the loss of each reaches. A backward takes
every step in this order and none twice; autograd only tells how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

# The order in which groups are needed: recorded once, then used. Pure -----------------------------

Key = TypeVar("Key", bound=Hashable)


class OrderRecord(Generic[Key]):
    """Records the order of one kind of pass and predicts the next one from it."""

    def __init__(self) -> None:
        self.recorded: tuple[Key, ...] = ()
        self._current: list[Key] = []
        self._position = 0

    def advance(self, key: Key, count: int = 1) -> list[Key]:
        """Note that ``key`` is needed now; return the next ``count`` others, as far as known."""
        self._current.append(key)
        expected = self.recorded
        position = self._position
        if position >= len(expected) or expected[position] != key:
            position = _find(expected, key, position)
        self._position = position + 1
        others: dict[Key, None] = {}
        for after in range(self._position, len(expected)):
            if len(others) == count:
                break
            if expected[after] != key:
                others[expected[after]] = None
        return list(others)

    @property
    def upcoming(self) -> Key | None:
        """Who is expected next, if known."""
        return self.recorded[self._position] if self._position < len(self.recorded) else None

    def finish(self) -> None:
        """End the pass; what was recorded predicts the next one."""
        if self._current:
            self.recorded = tuple(self._current)
        self.abandon()

    def abandon(self) -> None:
        """End a pass that failed; the previous record stays."""
        self._current.clear()
        self._position = 0


def _find(order: tuple[Key, ...], key: Key, start: int) -> int:
    """Index of ``key`` at or after ``start``, else anywhere, else past the end."""
    for index in (*range(start, len(order)), *range(min(start, len(order)))):
        if order[index] == key:
            return index
    return len(order)


def stays_for_backward(key: Key, forward: OrderRecord[Key], backward: OrderRecord[Key]) -> bool:
    """Tell whether ``key`` ended the last forward and opened the last backward.

    Such a group would be freed and gathered again with nothing in between.
    """
    return forward.recorded[-1:] == (key,) == backward.recorded[:1]


# Which calls there are inside of a call, for a rank that does not compute them. Pure -------------


class Called(Generic[Key]):
    """A call of a module of a group in a forward, with the calls inside of it.

    Attributes:
        group: The group.
        module: The module.
        inner: The calls inside, in order.
        checkpoint: The number of the activation checkpoint around it, if there is one.
        has_grad: Whether gradients were enabled inside: not so in a reentrant checkpoint.
        is_watched: Whether its outputs may get a gradient.
    """

    __slots__ = ("checkpoint", "group", "has_grad", "inner", "is_watched", "module")

    def __init__(self, group: Key, module: Hashable, inner: Sequence[Called[Key]] = ()) -> None:
        self.group = group
        self.module = module
        self.inner = list(inner)
        self.checkpoint: int | None = None
        self.has_grad = True
        self.is_watched = False


def outermost_within(
    calls: Sequence[Called[Key]], modules: Container[Hashable]
) -> list[Called[Key]]:
    """Return those calls of some modules that do not lie inside of another one of them."""
    found: list[Called[Key]] = []
    for called in calls:
        is_within = called.module in modules
        found += [called] if is_within else outermost_within(called.inner, modules)
    return found


# In which order a backward gathers and reduces groups: the reverse of forward, on all ranks. Pure


class Step(NamedTuple, Generic[Key]):
    """Something that every rank does once in a backward.

    Attributes:
        group: For which group.
        gathers: Whether its parameters are gathered; if not, its gradients are reduced.
    """

    group: Key
    gathers: bool


class Plan(NamedTuple, Generic[Key]):
    """What a backward through some forwards does.

    Attributes:
        steps: Its steps, the first one last, to be popped.
        called_again: The groups that the latest forward has called more than once.
        called_before: The groups that an earlier one has called besides.
        num_checkpoints: How many checkpoints compute a group again, for those that one does.
    """

    steps: list[Step[Key]]
    called_again: frozenset[Key]
    called_before: frozenset[Key]
    num_checkpoints: dict[Key, int]


NO_PLAN: Plan[Any] = Plan([], frozenset(), frozenset(), {})


class Interval:
    """From when to when a forward needed a group, for one call or for all in a checkpoint.

    Attributes:
        start: When the call, or the first one in the checkpoint, began.
        end: When it, or the last one, ended.
        is_shared: Whether it is that of a checkpoint, which computes all of its calls again if any.
        is_read: Whether a backward may read the groups of the calls.
    """

    __slots__ = ("end", "is_read", "is_shared", "start")

    def __init__(self, start: int, *, is_shared: bool) -> None:
        self.start = self.end = start
        self.is_shared = is_shared
        self.is_read = False


class _Visit:
    """What forwards have done with one group since the last backward.

    Attributes:
        forward: The number of the latest forward that entered it.
        earliest: Its first call of all.
        place: When its first call in that forward began.
        num_calls: How many calls there are in that forward.
        is_earlier: Whether an earlier forward has called it, too.
        left: Its calls that a backward may read it for, the last one last; of those in earlier
            forwards the last alone.
        checkpoints: The outermost checkpoints around its calls in that forward.
        num_before: How many there were around calls in earlier forwards.
        before: The same before the latest forward, if an earlier one has entered it.
    """

    __slots__ = (
        "before",
        "checkpoints",
        "earliest",
        "forward",
        "is_earlier",
        "left",
        "num_before",
        "num_calls",
        "place",
    )

    def __init__(self, interval: Interval, place: int, forward: int) -> None:
        self.earliest = interval
        self.place = place
        self.forward = forward
        self.num_calls = 0
        self.is_earlier = False
        self.left: list[Interval] = []
        self.checkpoints: set[Interval] = set()
        self.num_before = 0
        self.before: _Visit | None = None

    def again(self, place: int, forward: int) -> _Visit:
        """Return what comes of it in another forward."""
        visit = _Visit(self.earliest, place, forward)
        visit.is_earlier, visit.left = True, self.left[-1:]
        visit.num_before = self.num_before + len(self.checkpoints)
        visit.before, self.before = self, None
        return visit


class ExecutionOrder(Generic[Key]):
    """In which order forward and backward need groups; what forwards did since the last backward.

    A group is gathered where it was left last and reduced where it was entered first: in between,
    a backward may read it. An activation checkpoint computes all of its groups again at once, so
    all are gathered where the checkpoint was left, in the order of forward, and reduced where it
    began.

    Attributes:
        forward: The number of the latest forward.
        of_backward: In which order backwards gather.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.of_backward: OrderRecord[Key] = OrderRecord()
        self._of_forward: dict[Key, OrderRecord[Key]] = {}
        self._now = 0
        self._has_trained = False  # the latest forward has left a group that trains
        self._visits: dict[Key, _Visit] = {}

    def of_forward(self, outermost: Key) -> OrderRecord[Key]:
        """Return in which order the forwards gather that ``outermost`` opens.

        Each has a record of its own: calling an encoder alone is another pass than calling the
        model.
        """
        return self._of_forward.setdefault(outermost, OrderRecord())

    def begin(self) -> None:
        """Note that a forward begins."""
        self.forward += 1
        self._has_trained = False

    def enter(self, group: Key, checkpoints: Sequence[dict[Any, Any]] = ()) -> Interval:
        """Note that a call of ``group`` begins.

        Args:
            group: The group.
            checkpoints: For each checkpoint around the call, what the callers keep with it.

        Returns:
            To be passed to :meth:`leave`.
        """
        self._now += 1
        interval = self._interval(checkpoints)
        visit = self._visits.get(group)
        if visit is None:
            visit = self._visits[group] = _Visit(interval, self._now, self.forward)
        elif visit.forward != self.forward:
            visit = self._visits[group] = visit.again(self._now, self.forward)
        visit.num_calls += 1
        if checkpoints:
            visit.checkpoints.add(interval)
        return interval

    def _interval(self, checkpoints: Sequence[dict[Any, Any]]) -> Interval:
        kept = [one for notes in checkpoints if (one := notes.get(self)) is not None]
        interval = kept[0] if kept else Interval(self._now, is_shared=bool(checkpoints))
        for notes in checkpoints:  # those within each other share the interval of the outermost
            notes[self] = interval
        return interval

    def leave(self, group: Key, interval: Interval, *, trains: bool, is_watched: bool) -> None:
        """Note that a call of ``group`` ends.

        Args:
            group: The group.
            interval: What :meth:`enter` has returned.
            trains: Whether the group has trainable parameters.
            is_watched: Whether outputs of the call may get a gradient. One of a frozen group may on
                another rank only, if a trainable group has run before; it counts on all ranks then.
        """
        self._now += 1
        interval.end = self._now
        interval.is_read = interval.is_read or trains or is_watched or self._has_trained
        visit = self._visits.get(group)
        left = [] if visit is None else visit.left
        may_be_read = interval.is_read or (interval.is_shared and not left)
        if visit is not None and may_be_read and interval not in left[-1:]:
            left.append(interval)
        self._has_trained = self._has_trained or trains

    def forget(self, group: Key) -> None:
        """Note that no backward will read ``group`` for its last call any more."""
        visit = self._visits.get(group)
        if visit is not None and visit.left:
            visit.left.pop()

    def abandon(self) -> None:
        """Forget the calls in the latest forward, which failed."""
        for group, visit in list(self._visits.items()):
            if visit.forward == self.forward and visit.before is not None:
                self._visits[group] = visit.before
            elif visit.forward == self.forward:
                del self._visits[group]

    def clear(self) -> None:
        """Forget all calls."""
        self._visits.clear()

    def start_anew(self) -> None:
        """Forget all that was recorded, of which other ranks may know nothing."""
        self.of_backward = OrderRecord()
        self._of_forward.clear()
        self.clear()

    def __contains__(self, group: Key) -> bool:
        return group in self._visits

    def __bool__(self) -> bool:
        return bool(self._visits)

    def last_entered_first(self) -> list[Key]:
        """Return all groups, those that were entered later before others."""
        return sorted(self._visits, key=lambda group: -self._visits[group].place)

    def plan(self, reduces: Callable[[Key], bool]) -> Plan[Key]:
        """Return the plan of a backward through all forwards.

        Where several forwards ran before it, a group is reduced where the first of them entered it:
        the loss may be the sum of theirs, on this rank or on another.

        Args:
            reduces: Tells whether a group has gradients to be reduced.
        """
        counts = {group: v.num_before + len(v.checkpoints) for group, v in self._visits.items()}
        return Plan(
            self._steps(reduces),
            frozenset(group for group, visit in self._visits.items() if visit.num_calls > 1),
            frozenset(group for group, visit in self._visits.items() if visit.is_earlier),
            {group: count for group, count in counts.items() if count},
        )

    def _steps(self, reduces: Callable[[Key], bool]) -> list[Step[Key]]:
        found: list[tuple[int, int, Step[Key]]] = []
        for group, visit in self._visits.items():
            left = visit.left[-1] if visit.left and visit.left[-1].is_read else None
            if left is not None:
                found.append((left.end, -visit.place, Step(group, gathers=True)))
            if left is not None or reduces(group):
                found.append((visit.earliest.start, visit.place, Step(group, gathers=False)))
        found.sort(key=itemgetter(0, 1))
        return [step for _, _, step in found]
