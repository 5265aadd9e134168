"""What the microbatches of some trees weigh together, and gradients that are divided by it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import torch

from composable_shard import _torch
from composable_shard.core.gradient import has_hooks, reduced
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.core.tally import Sum, Tally
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
    """

    total: Fraction
    divisor: float
    versions: tuple[int, int]


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
        self._not_zero: dict[ShardedParam, bool] = {}  # of those that have changed
        self._others: dict[ShardedParam, tuple[Any, tuple[int, int]]] = {}

    def add(self, weight: float | torch.Tensor, loss: torch.Tensor | None) -> Weighed:
        """Note what a microbatch of this rank weighs.

        Collective: an all-reduce of 48 bytes that is not waited for, unless without sync.
        """
        for group in self._groups():
            _refuse_other_changes(group)
        self._tally.note(weight, loss)
        self._asked.append(Weighed())
        if self.trees[0].groups[0].settings.requires_gradient_sync:
            self._tally.say()
        return self._asked[-1]

    def begin_backward(self, tree: Reducing) -> None:
        """Note that gradients of ``tree`` may come."""
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
                self._not_zero[param] = bool(_local(param).any())
            kept.append((param, 1 / mark.divisor))
        _divide(kept)

    def end_backward(self, tree: Reducing) -> None:
        """Divide gradients of groups that are reduced, unless any are on their way.

        Raises:
            ValueError, ShardError, RankMismatchError: See weigh. The gradients are ``None`` then.

        Collective: an all-reduce of 48 bytes if there is a weight that has not been sent, and one
            of 8 bytes for each gradient that was changed since it was divided.
        """
        self._in_backward.discard(tree)
        if self._in_backward or any(one.is_under_way for one in self.trees):
            return
        left = {group for one in self.trees for group in one.left}
        done = [group for group in self._reduced if group not in left]
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
        if self._tally.has_any:
            try:
                heard = self._tally.hear()
            except Exception:
                self._clear(done)
                raise
            self._weight += Fraction(heard.weight)
            self._since = self._since.plus(heard)
        for one in asked:
            one.set(*self._since[:2])
        divided = []
        for param in self._delivered(done):
            _, start = self._opened.pop(param, (None, self._start))
            divided.append((param, start, 1.0))
        divided += [(param, start, mark.divisor) for param, mark, start in untouched]
        self._mark(divided)
        if not self._since.weight:
            self._start, self._since = self._weight, Sum()

    def _forget_cleared(self) -> None:
        """Begin anew if gradients that were divided have been cleared.

        Collective: see end_backward.
        """
        is_gone = any(one not in self._opened and _mark_of(one) is None for one in self._marked)
        if self._not_zero:
            every = (param for group in self._groups() for param in group.params)
            changed = [param for param in every if param in self._not_zero]
            are_kept = self._tally.agree_on_any([self._not_zero[param] for param in changed])
            for param, is_kept in zip(changed, are_kept, strict=True):
                if not is_kept:
                    del self._opened[param]
                    is_gone = True
            self._not_zero = {}
        steps = sum(group.freshness.num_optimizer_steps for group in self._groups())
        if is_gone or (not self._marked and steps != self._steps):
            self._start, self._since = self._weight, Sum()
        self._steps = steps

    def _delivered(self, done: Sequence[ParamGroup]) -> Iterator[ShardedParam]:
        """Yield the parameters of some groups to whose gradients reductions have added."""
        for group in done:
            for param in group.params:
                before = self._others.pop(param, None)
                if reduced(param) is None or _mark_of(param) is not None:
                    continue
                if (
                    before is None
                    or before[0] is not param.sharded.grad
                    or before[1] != _versions(param)
                ):
                    yield param

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
            marks.append((param, total, divisor, is_changed))
            if divisor != before:
                pairs.append((param, divisor / before))
        _divide(pairs)
        for param, total, divisor, is_changed in marks:
            versions = _CHANGED if is_changed else _versions(param)
            vars(param.sharded.grad)[_MARK] = _Mark(total, divisor, versions)
        self._marked = [param for param, *_ in marks]

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
    for tree in trees:
        for other in tree.weights.trees if tree.weights is not None else ():
            if other not in trees:
                other.weights = Weights([other])
    for tree in trees:
        tree.weights = together
    return together


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
def _divide(pairs: Iterable[tuple[ShardedParam, float]]) -> None:
    """Divide gradients, each by a number of its own."""
    alike: dict[tuple[float, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param, divisor in pairs:
        local = _local(param)
        alike.setdefault((divisor, local.device, local.dtype), []).append(local)
    for (divisor, _, _), locals_ in alike.items():
        _torch.divide_all_(locals_, divisor)
