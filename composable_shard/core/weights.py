"""What the microbatches of some trees weigh together, and gradients that are divided by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.gradient import has_hooks, reduced
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.errors import RankMismatchError, ShardError
from composable_shard.mesh import ShardMesh

_ADDING = "adding what microbatches weigh"
_DIVIDED = "_composable_shard_divided"


class Weighed:
    """What microbatches weigh together, since gradients were cleared.

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


# What all ranks weigh -----------------------------------------------------------------------------


class _Sum(NamedTuple):
    """What was weighed: the sums of the weights and of the losses, and how often, by all ranks."""

    weight: float = 0.0
    loss: float = 0.0
    num: int = 0


class _Tally:
    """Adds up what the ranks of a mesh weigh.

    Hazard: a rank that has failed before its backward, and goes on, is heard with the wrong
    microbatch for ever. Guard: ranks say which it is for them. Test:
    ``test_ranks_that_weigh_different_microbatches_hear_of_it``.

    Attributes:
        has_unsaid: Whether this rank has weighed something that it has not said.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh
        self._unsaid: list[tuple[Any, torch.Tensor | None]] = []
        self._said: list[Any] = []  # weights
        self._sums: list[SmallAllReduce] = []
        self._num_heard = 0

    @property
    def has_unsaid(self) -> bool:
        return bool(self._unsaid)

    def note(self, weight: Any, loss: torch.Tensor | None) -> None:
        """Note what a microbatch of this rank weighs."""
        self._unsaid.append((weight, None if loss is None else loss.detach()))

    def say(self, *, is_anew: bool) -> None:
        """Launch the sum of what was noted.

        Args:
            is_anew: Whether, as far as this rank knows, gradients were cleared before.

        Collective: an all-reduce of 56 bytes that is not waited for.
        """
        device, number = self._mesh.device, self._num_heard + len(self._sums) + 1
        said = torch.zeros(7, dtype=torch.float64, device=device)
        for weight, loss in self._unsaid:
            one = torch.as_tensor(weight, dtype=torch.float64, device=device).detach().sum()
            said[0] += torch.where(one.isfinite() & (one >= 0), one, math.nan)
            said[1] += 0.0 if loss is None else loss.to(device).sum()
        said[2:] += said.new_tensor([len(self._unsaid), not is_anew, 1, number, number**2])
        add: Any = dist.ReduceOp.SUM
        self._sums.append(SmallAllReduce(said, add, self._mesh, _ADDING))
        self._said += [weight for weight, _ in self._unsaid]
        self._unsaid = []

    def forget(self) -> None:
        """Forget what was noted and what was said."""
        self._num_heard += len(self._sums)
        self._unsaid, self._said, self._sums = [], [], []

    def hear(self, before: _Sum) -> _Sum:
        """Wait for what was said, and return what was weighed since gradients were cleared.

        Args:
            before: What had been weighed, if they were not.

        Raises:
            ValueError, ShardError, RankMismatchError: See weigh.
        """
        heard, number = _Sum(), self._num_heard
        sums, said = self._sums, self._said
        self.forget()
        for place, one in enumerate(sums):
            weight, loss, num, num_not_anew, num_ranks, *numbers = one.wait()
            number += 1
            if numbers != [num_ranks * number, num_ranks * number**2]:
                raise RankMismatchError(
                    f"Expected all ranks to weigh their microbatches in step, got number {number} "
                    "on this rank and another one on some; one has failed before its backward, or "
                    "has left weigh() out: a rank without a batch weighs 0"
                )
            if place == 0 and num_not_anew:
                heard = before
            heard = _Sum(heard.weight + weight, heard.loss + loss, heard.num + int(num))
        if math.isnan(heard.weight):
            _refuse(said)
        return heard


def _refuse(weights: Iterable[Any]) -> NoReturn:
    """Raise for a weight that is none, of this rank or of another."""
    for given in map(float, weights):
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"Expected a weight that is finite and not negative, got {given}")
    raise ShardError(
        "Expected weights that are finite and not negative on all ranks, got another one on some "
        "rank"
    )


# Gradients that are divided by it -----------------------------------------------------------------


class Reducing(Protocol):
    """What one tree has to reduce.

    Attributes:
        groups: Its groups.
        is_any_left: Whether gradients are to be reduced, or are under way.
    """

    groups: Sequence[ParamGroup]

    @property
    def is_any_left(self) -> bool: ...


class Weights:
    """The weights of some trees since gradients were cleared.

    Reductions average over ranks as ever. When they are over, gradients are divided by what all
    microbatches weigh for each rank; before others are added they are multiplied again, so that
    both are of one kind. A gradient that was divided is marked: one that the user has put there is
    told from it, and one that the user has cleared by zeros.

    Args:
        trees: Which.
    """

    def __init__(self, trees: Sequence[Reducing]) -> None:
        self._trees = trees
        meshes = (tree.groups[0].mesh for tree in trees)
        self._tally = _Tally(max(meshes, key=lambda mesh: mesh.num_ranks))
        self._asked: list[Weighed] = []
        self._all = _Sum()
        self._in_backward: set[Reducing] = set()
        self._is_open = False  # whether gradients are sums that are not divided
        self._is_unsaid = False  # whether they were opened and nothing was said since
        self._is_anew = False  # whether they had been cleared on this rank

    def add(self, weight: float | torch.Tensor, loss: torch.Tensor | None) -> Weighed:
        """Note what a microbatch of this rank weighs, before its backward."""
        for group in self._groups():
            _refuse_other_changes(group)
        self._tally.note(weight, loss)
        self._asked.append(Weighed())
        return self._asked[-1]

    def begin_backward(self, tree: Reducing) -> None:
        """Note that gradients of ``tree`` may come."""
        self._in_backward.add(tree)

    def open(self) -> None:
        """Make sums again of gradients that others are going to be added to."""
        if self._is_open:
            return
        marked = [(one, vars(one.sharded.grad).pop(_DIVIDED, None)) for one in self._params()]
        divided = [(param, version) for param, version in marked if version is not None]
        if not divided and not self._tally.has_unsaid:
            return
        kept = [param for param, version in divided if not _is_cleared(param, version)]
        self._is_open, self._is_unsaid, self._is_anew = True, True, not kept
        _divide(kept, lambda num_ranks: num_ranks / self._all.weight)

    def say(self) -> None:
        """Launch the sum over all ranks of what was weighed, if anything was.

        Collective: an all-reduce of 56 bytes that is not waited for, or none.
        """
        if self._is_unsaid or self._tally.has_unsaid:
            self._tally.say(is_anew=self._is_anew)
            self._is_unsaid = False

    def end_backward(self, tree: Reducing) -> None:
        """Divide gradients, if all of them are reduced.

        Raises:
            ValueError, ShardError, RankMismatchError: See weigh. The gradients are ``None`` then.

        Collective: what ``say`` does, if that has not been said.
        """
        self._in_backward.discard(tree)
        if self._in_backward or any(one.is_any_left for one in self._trees):
            return
        if not self._is_open:  # nothing to train
            self._forget()
            return
        self.say()
        self._is_open = False
        asked, self._asked = self._asked, []
        try:
            self._all = self._tally.hear(self._all)
        except Exception:
            self._all = _Sum()
            self._clear()
            raise
        for one in asked:
            one.set(self._all.weight, self._all.loss)
        if self._all.weight:
            self._close()
        elif self._all.num:
            self._clear()

    def abandon(self) -> None:
        """Forget what was weighed for a backward that failed; let gradients be what they were."""
        self._in_backward.clear()
        self._forget()
        if self._is_open:
            self._is_open = False
            if self._all.weight:
                self._close()

    def _forget(self) -> None:
        self._tally.forget()
        self._asked = []

    def _groups(self) -> Iterator[ParamGroup]:
        return (group for tree in self._trees for group in tree.groups)

    def _params(self) -> Iterator[ShardedParam]:
        """Iterate over the parameters whose gradients are reduced."""
        for group in self._groups():
            yield from (param for param in group.params if reduced(param) is not None)

    def _clear(self) -> None:
        for param in self._params():
            param.sharded.grad = None

    def _close(self) -> None:
        """Divide sums, and mark what they become."""
        params = list(self._params())
        _divide(params, lambda num_ranks: self._all.weight / num_ranks)
        for param in params:
            grad: Any = param.sharded.grad
            vars(grad)[_DIVIDED] = grad._version


def _refuse_other_changes(group: ParamGroup) -> None:
    """Raise ``ShardError`` if something else divides gradients, or sees those that are not."""
    divisor = group.settings.reduction.divisor
    if divisor is not None:
        raise ShardError(
            f"Expected no gradient divide factor beside weigh(), which divides by what all "
            f"microbatches weigh, got {divisor} for {group.label}; leave out "
            "set_gradient_divide_factor()"
        )
    for param in group.params:
        if has_hooks(param):
            raise ShardError(
                f"Expected no hooks on gradients beside weigh(), which divides them after all are "
                f"reduced, got one on '{param.name}'; remove it, or divide by the sum of the "
                "weights yourself"
            )


def _is_cleared(param: ShardedParam, version: int) -> bool:
    """Tell whether the user has set a gradient to zeros since it was of ``version``."""
    grad, local = param.sharded.grad, reduced(param)
    return grad is None or local is None or (grad._version != version and not local.any())


@torch.no_grad()
def _divide(params: Iterable[ShardedParam], divisor: Callable[[int], float]) -> None:
    """Divide gradients by a number that depends on that of the ranks they are averages over."""
    alike: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in params:
        local = reduced(param)
        assert local is not None
        key = param.mesh.num_ranks, local.device, local.dtype
        alike.setdefault(key, []).append(local)
    for (num_ranks, _, _), locals_ in alike.items():
        _torch.divide_all_(locals_, divisor(num_ranks))
