"""What the microbatches of some trees weigh together, and gradients that are divided by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import torch

from composable_shard import _torch
from composable_shard.core.gradient import has_hooks, is_partial, reduced
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.core.weighing.cleared import Beginnings, Left
from composable_shard.core.weighing.tally import Heard, Sum, Tally
from composable_shard.errors import ShardError
from composable_shard.mesh import largest_of

_MARK = "_composable_shard_divided"
_CHANGED = (-1, -1)  # stands for versions that a gradient does not have any more


class Weighed:
    """What microbatches weigh together, since gradients were cleared last.

    Known when the backward of the one that it was returned for, or a later one, has reduced.

    Attributes:
        total: The sum of the weights of all ranks and microbatches.
        loss: The sum of their losses by ``total``; NaN if nothing weighs anything.
    """

    def __init__(self) -> None:
        self._known: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        return self._get()[0]

    @property
    def loss(self) -> float:
        total, loss = self._get()
        return loss / total if total else math.nan

    def _get(self) -> tuple[float, float]:
        if self._known is None:
            raise ShardError(
                "Expected a backward that reduces gradients before asking what all microbatches "
                "weigh, got none yet; ask after loss.backward()"
            )
        return self._known

    def set(self, total: float, loss: float) -> None:
        """Let it be known."""
        self._known = total, loss


# Gradients that are divided by it -----------------------------------------------------------------


class _Mark(NamedTuple):
    """What is noted on a gradient that was divided.

    Attributes:
        total: What has been weighed since it was begun.
        divisor: What it was divided by.
        versions: Its version counters since.
        norms: Of what it is made of on this rank; the host waits for them only where it must know
            whether it was zeros.
    """

    total: Fraction
    divisor: float
    versions: tuple[int, int]
    norms: Sequence[torch.Tensor]

    @property
    def is_zero(self) -> bool:
        """Whether it was zeros when it was added to last, so that it does not tell of clearing."""
        return not any(map(bool, self.norms))


class Past(NamedTuple):
    """What was weighed, for ranks that go on with the gradients of others.

    Attributes:
        weight: What has been weighed in all.
        start: What had been when gradients were cleared last.
        since: What has been since.
        totals: Of each gradient that was divided, what has been weighed since it was begun, and
            whether it has been written to.
    """

    weight: Fraction
    start: Fraction
    since: Sum
    totals: dict[ShardedParam, tuple[Fraction, bool]]


class Reducing(Protocol):
    """What one tree has to reduce.

    Attributes:
        groups: Its groups.
        weights: What its microbatches weigh, if anybody has said so.
        is_under_way: Whether reductions are under way.
        left: The groups with gradients that are to be reduced later.
    """

    groups: Sequence[ParamGroup]
    weights: Weights | None

    @property
    def is_under_way(self) -> bool: ...

    @property
    def left(self) -> Collection[ParamGroup]: ...


class Weights:
    """What microbatches of some trees weigh, and their gradients.

    Reductions average over ranks as ever. When they are over, a gradient is divided by what has
    been weighed since it was begun, for each rank; before anything is added, it is multiplied
    again, so that both are of one kind. A gradient that was divided is marked. So one that was
    cleared is seen: the mark is gone with it, or it is zeros of another version on all ranks.
    For gradients that are not reduced yet, see ``cleared.py``.
    One of backwards that were not weighed is divided by 1. What the user has put there has no mark,
    and stays as it is until something is added.

    Args:
        trees: Which.
    """

    def __init__(self, trees: Sequence[Reducing]) -> None:
        self.trees = trees
        self._tally = Tally(largest_of(group.mesh for group in self._groups()))
        self._asked: list[Weighed] = []
        self._weight = self._start = Fraction()  # of all that was heard, and when last cleared
        self._since = Sum()  # then
        self._steps = 0
        self._in_backward: set[Reducing] = set()
        self._added_to: set[ParamGroup] = set()  # since gradients were divided
        self._reduced: dict[ParamGroup, None] = {}
        self._marked: list[ShardedParam] = []
        self._opened: dict[ShardedParam, tuple[_Mark, Fraction]] = {}  # and when it was begun
        self._not_zero: dict[ShardedParam, tuple[bool, bool]] = {}  # of those changed: now, before
        self._others: dict[ShardedParam, tuple[Any, tuple[int, int]]] = {}
        self._left = Left()

    def add(self, weight: float | torch.Tensor, loss: torch.Tensor | None) -> Weighed:
        """Note what a microbatch of this rank weighs.

        Collective: an all-reduce of 56 bytes that is not waited for, unless without sync or behind
            another microbatch that is not reduced: its gradients may be cleared before backward.
        """
        for group in self._groups():
            _refuse_other_changes(group)
        is_first = not self._tally.num_noted
        self._tally.note(weight, loss)
        self._asked.append(Weighed())
        if is_first and self.trees[0].groups[0].settings.requires_gradient_sync:
            self._tally.say()
        return self._asked[-1]

    def begin_backward(self, tree: Reducing) -> None:
        """Note that gradients of ``tree`` may come."""
        if not self._in_backward:
            self._left.begin_backward()
        self._in_backward.add(tree)

    def open(self, group: ParamGroup, *, reduces: bool) -> None:
        """Make sums again of gradients that others are going to be added to.

        Args:
            group: Whose.
            reduces: Whether these are reduced, and not accumulated.
        """
        is_first = group not in self._added_to
        self._added_to.add(group)
        if reduces:
            self._reduced[group] = None
        self._left.look_at(group.params)
        kept = []
        for param in group.params:
            if reduced(param) is None or param in self._opened:
                continue
            grad: Any = param.sharded.grad
            mark: _Mark | None = vars(grad).pop(_MARK, None)
            if mark is None:
                if is_first:
                    self._others[param] = grad, _versions(param)
                continue
            self._opened[param] = mark, self._weight - mark.total
            if mark.versions != _versions(param):
                self._not_zero[param] = bool(_local(param).any()), not mark.is_zero
            kept.append((param, 1 / mark.divisor))
        _divide(kept)

    def end_backward(self, tree: Reducing) -> None:
        """Divide gradients of groups that are reduced, unless any are on their way.

        Raises:
            ValueError, ShardError, RankMismatchError: See weigh. The gradients are ``None`` then.

        Collective: an all-reduce of 56 bytes if there is a weight that has not been sent; one of
            16 bytes for each gradient that was changed since it was divided; and two all-gathers of
            small objects if gradients have been cleared that were not reduced.
        """
        self._in_backward.discard(tree)
        if self._in_backward:
            return
        left = {group for one in self.trees for group in one.left}
        is_under_way = any(one.is_under_way for one in self.trees)
        done = [group for group in self._reduced if group not in left and not is_under_way]
        waiting = (group for group in self._added_to if group not in done)
        self._left.end_backward(self._waiting(waiting), self._tally.num_noted)
        if done:
            self._reduced = dict.fromkeys(group for group in self._reduced if group in left)
            self._added_to.difference_update(done)
            self._divide_again(done)

    def _divide_again(self, done: Sequence[ParamGroup]) -> None:
        """Divide the gradients of groups that are reduced, and again those that were divided."""
        self._forget_cleared()
        asked, self._asked = self._asked, []
        marks = ((param, _mark_of(param)) for param in self._marked)
        untouched = [(one, mark, self._weight - mark.total) for one, mark in marks if mark]
        begun: dict[ShardedParam, Fraction] = {}
        if self._tally.num_noted:
            begun = self._hear(done)
        for one in asked:
            one.set(*self._since[:2])
        divided = []
        for param in self._delivered(done):
            _, start = self._opened.pop(param, (None, self._start))
            divided.append((param, begun.get(param, start), 1.0))
        divided += [(param, start, mark.divisor) for param, mark, start in untouched]
        self._mark(divided)
        if not self._since.weight:
            self._start, self._since = self._weight, Sum()

    def _hear(self, done: Sequence[ParamGroup]) -> dict[ShardedParam, Fraction]:
        """Hear what all ranks weigh.

        Returns:
            What had been weighed when gradients were begun, if any were cleared that were not
            reduced; of those that are multiplied back, it is known.

        Collective: see end_backward.
        """
        every = [param for group in self._groups() for param in group.params]
        numbers = {param: number for number, param in enumerate(every)}
        try:
            heard = self._tally.hear(self._left.seen(numbers) if self._left.saw_any else None)
        except Exception:
            self._clear(done)
            raise
        finally:
            self._left.begin_anew(param for group in done for param in group.params)
        if not heard.seen:
            self._weight += Fraction(heard.sum.weight)
            self._since = self._since.plus(heard.sum)
            return {}
        return self._begin_again(heard, every)

    def _begin_again(
        self, heard: Heard, every: Sequence[ShardedParam]
    ) -> dict[ShardedParam, Fraction]:
        beginnings, sums, start = Beginnings(heard.seen), [self._weight], self._start
        for part in heard.parts:
            sums.append(sums[-1] + Fraction(part.weight))
        last = beginnings.cuts[-1] if beginnings.cuts else 0
        since = Sum() if last else self._since
        self._since = functools.reduce(Sum.plus, heard.parts[last:], since)
        self._weight = sums[-1]
        self._start = sums[last] if last else start
        places = {param: beginnings.of(number) for number, param in enumerate(every)}
        return {
            param: sums[place] if place else start
            for param, place in places.items()
            if place or param not in self._opened
        }

    def _forget_cleared(self) -> None:
        """Begin anew if gradients that were divided have been cleared.

        Collective: see end_backward.
        """
        is_gone = self._is_begun_anew()
        if self._not_zero:
            every = (param for group in self._groups() for param in group.params)
            changed = [param for param in every if param in self._not_zero]
            flags = [flag for param in changed for flag in self._not_zero[param]]
            agreed = self._tally.agree_on_any(flags)
            are_kept, were_any = agreed[::2], agreed[1::2]
            zeros = [one for one, is_kept in zip(changed, are_kept, strict=True) if not is_kept]
            pairs = zip(are_kept, were_any, strict=True)
            is_gone = is_gone or any(was_any and not is_kept for is_kept, was_any in pairs)
            for param in zeros if is_gone else ():  # as the others, if it was zeros before
                del self._opened[param]
            self._not_zero = {}
        if is_gone:
            self._start, self._since = self._weight, Sum()
        self._steps = self._num_steps()

    def _is_begun_anew(self) -> bool:
        """Tell whether gradients that were divided are gone, or an optimizer has used others."""
        is_gone = any(one not in self._opened and _mark_of(one) is None for one in self._marked)
        return is_gone or (not self._marked and self._num_steps() != self._steps)

    def _num_steps(self) -> int:
        return sum(group.freshness.num_optimizer_steps for group in self._groups())

    def _delivered(self, done: Sequence[ParamGroup]) -> Iterator[ShardedParam]:
        """Yield the parameters of some groups to whose gradients reductions have added."""
        for group in done:
            for param in group.params:
                is_others = self._is_others(param)
                self._others.pop(param, None)
                if reduced(param) is not None and _mark_of(param) is None and not is_others:
                    yield param

    def _waiting(self, groups: Iterable[ParamGroup]) -> Iterator[ShardedParam]:
        """Yield the parameters of some groups whose gradients were accumulated without sync.

        What a reduction under way adds to others moves their versions as a user does.
        """
        for group in groups:
            for param in group.params:
                is_alone = param.mesh.num_ranks == 1 and param.is_unsynced
                is_summed = is_alone and reduced(param) is not None and not self._is_others(param)
                if is_partial(param.sharded.grad) or (is_summed and _mark_of(param) is None):
                    yield param

    def _is_others(self, param: ShardedParam) -> bool:
        """Tell whether a reduced gradient is what the user has put there."""
        grad, versions = self._others.get(param, (None, None))
        return grad is not None and grad is param.sharded.grad and versions == _versions(param)

    def _mark(self, divided: Sequence[tuple[ShardedParam, Fraction, float]]) -> None:
        """Divide gradients, and mark what they become.

        Args:
            divided: Of each the parameter, what had been weighed when it was begun, and what it is
                divided by.
        """
        pairs, marks = [], []
        for param, start, before in divided:
            total = self._weight - start
            if not total and self._since.num:
                param.sharded.grad = None
                continue
            mark = _mark_of(param)
            is_changed = mark is not None and mark.versions != _versions(param)
            divisor = float(total) / param.mesh.num_ranks if total else 1.0
            marks.append((param, mark, total, divisor, is_changed))
            if divisor != before:
                pairs.append((param, divisor / before))
        _divide(pairs)
        norms = _norms([param for param, mark, *_ in marks if mark is None])
        for param, mark, total, divisor, is_changed in marks:
            versions = _CHANGED if is_changed else _versions(param)
            own = norms[param] if mark is None else mark.norms
            vars(param.sharded.grad)[_MARK] = _Mark(total, divisor, versions, own)
        self._marked = [param for param, *_ in marks]

    def past(self) -> Past:
        """Return what was weighed. Collective: none."""
        every = (param for group in self._groups() for param in group.params)
        totals = {
            param: (mark.total, mark.versions != _versions(param))
            for param in every
            if (mark := _mark_of(param)) is not None
        }
        if self._is_begun_anew():
            return Past(self._weight, self._weight, Sum(), totals)
        return Past(self._weight, self._start, self._since, totals)

    def go_on(self, past: Past) -> None:
        """Go on with gradients that lie on these ranks from now on. Collective: none."""
        self._weight, self._start, self._since = past.weight, past.start, past.since
        self._steps = self._num_steps()
        self._marked = [*past.totals]
        norms = _norms(self._marked)
        for param, (total, is_changed) in past.totals.items():
            divisor = float(total) / param.mesh.num_ranks if total else 1.0
            versions = _CHANGED if is_changed else _versions(param)
            vars(param.sharded.grad)[_MARK] = _Mark(total, divisor, versions, norms[param])

    def abandon(self) -> None:
        """Forget what was weighed for a backward that failed; let gradients be what they were."""
        self._in_backward.clear()
        self.forget()
        self._added_to.clear()
        self._reduced, self._others, self._not_zero = {}, {}, {}
        opened, self._opened = self._opened, {}
        back = [(one, mark) for one, (mark, _) in opened.items() if reduced(one) is not None]
        _divide((param, mark.divisor) for param, mark in back)
        for param, mark in back:
            vars(param.sharded.grad)[_MARK] = mark._replace(versions=_versions(param))

    def forget(self) -> None:
        """Forget what was weighed for a backward that will not be."""
        self._tally.forget()
        self._left.begin_anew()
        self._asked = []

    def _groups(self) -> Iterator[ParamGroup]:
        return (group for tree in self.trees for group in tree.groups)

    def _clear(self, groups: Sequence[ParamGroup]) -> None:
        self._opened = {}
        for group in groups:
            for param in group.params:
                if reduced(param) is not None:
                    param.sharded.grad = None


def weigh_together(trees: Sequence[Reducing]) -> Weights:
    """Return what trees weigh together; from now on each of those they did it with, by itself."""
    weights = trees[0].weights
    if weights is not None and set(weights.trees) == set(trees):
        return weights
    together = Weights(trees)
    part(trees)
    for tree in trees:
        tree.weights = together
    return together


def part(trees: Sequence[Reducing]) -> None:
    """Let trees forget what was weighed; each of those they did it with goes on by itself."""
    for tree in trees:
        for other in tree.weights.trees if tree.weights is not None else ():
            if other not in trees:
                other.weights = Weights([other])
    for tree in trees:
        tree.weights = None


def _refuse_other_changes(group: ParamGroup) -> None:
    """Raise ``ShardError`` if something else divides gradients, or sees those that are not."""
    reduction = group.settings.reduction
    if reduction.divisor is not None:
        raise ShardError(
            f"Expected no gradient divide factor beside weigh(), which divides by what all "
            f"microbatches weigh, got {reduction.divisor} for {group.label}; leave out "
            "set_gradient_divide_factor()"
        )
    hooked = [f"'{param.name}'" for param in group.params if has_hooks(param)]
    if reduction.hook is not None:
        hooked.append(f"the reductions of {group.label}")
    if hooked:
        raise ShardError(
            f"Expected no hooks on gradients beside weigh(), which divides them after all are "
            f"reduced, got one on {hooked[0]}; remove it, or divide by the sum of the weights "
            "yourself"
        )


def _local(param: ShardedParam) -> torch.Tensor:
    local = reduced(param)
    assert local is not None
    return local


def _mark_of(param: ShardedParam) -> _Mark | None:
    grad: Any = param.sharded.grad
    return None if grad is None else vars(grad).get(_MARK)


def _versions(param: ShardedParam) -> tuple[int, int]:
    """Return the version counters of a gradient and of its shard: users may write to either."""
    grad: Any = param.sharded.grad
    return grad._version, _local(param)._version


@torch.no_grad()
def _norms(params: Sequence[ShardedParam]) -> dict[ShardedParam, list[torch.Tensor]]:
    """Return the largest elements of gradients: of each of the plain tensors it is made of."""
    found: dict[ShardedParam, list[torch.Tensor]] = {param: [] for param in params}
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[ShardedParam, torch.Tensor]]] = {}
    for param in params:
        for leaf in _torch.leaves(_local(param)):
            if leaf.numel():
                alike.setdefault((leaf.device, leaf.dtype), []).append((param, leaf))
    for pairs in alike.values():
        norms = _torch.norms_of_all([leaf for _, leaf in pairs], math.inf, None)
        for (param, _), norm in zip(pairs, norms, strict=True):
            found[param].append(norm)
    return found


@torch.no_grad()
def _divide(pairs: Iterable[tuple[ShardedParam, float]]) -> None:
    """Divide gradients, each by a number of its own."""
    alike: dict[tuple[float, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param, divisor in pairs:
        local = _local(param)
        alike.setdefault((divisor, local.device, local.dtype), []).append(local)
    for (divisor, _, _), locals_ in alike.items():
        _torch.divide_all_(locals_, divisor)
