"""What the microbatches of one tree weigh together, and gradients that are divided by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.gradient import has_hooks, reduced
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.errors import RankMismatchError, ShardError

_ADDING = "adding what microbatches weigh"


class Weighed:
    """What all microbatches between two steps weigh, on all ranks, once a backward has reduced.

    Attributes:
        total: The sum of what they weigh.
        loss: The sum of their losses by ``total``: the mean; NaN if nothing weighs anything.
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


class Weights:
    """The weights of one tree since gradients were cleared.

    Reductions average over ranks as ever. When they are over, gradients are divided by what all
    microbatches weigh for each rank; before the next backward adds to them they are multiplied
    again, so that they are sums of the same kind.

    Args:
        groups: All groups, the root first.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._root = groups[0]
        self._own = [0.0, 0.0]  # not launched: weight and loss
        self._has_own = False
        self._num_launched = 0
        self._launched: list[tuple[int, SmallAllReduce]] = []
        self._failure: Exception | None = None
        self._weighed = Weighed()
        self._total = self._loss = 0.0  # of the gradients that are divided
        self._is_open = False  # whether gradients are sums until the next reduction
        self._divided: list[tuple[ShardedParam, torch.Tensor, int]] = []
        self._others: list[tuple[ShardedParam, torch.Tensor]] = []

    def add(self, weight: Any, loss: torch.Tensor | None) -> Weighed:
        """Note what a microbatch of this rank weighs, before its backward.

        Collective: an all-reduce of 16 bytes over all ranks of the root, unless without sync.
        """
        self._check()
        own = [float(weight), 0.0 if loss is None else float(loss.detach())]
        if not (math.isfinite(own[0]) and own[0] >= 0):
            self._failure = ValueError(
                f"Expected a weight that is finite and not negative, got {weight!r}"
            )
            own[0] = math.nan
        if not self._has_divided():
            self._forget()
        self._own = [one + more for one, more in zip(self._own, own, strict=True)]
        self._has_own = True
        if self._root.settings.requires_gradient_sync:
            self._launch()
        return self._weighed

    def _check(self) -> None:
        for group in self._groups:
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
                        f"Expected no hooks on gradients beside weigh(), which divides them after "
                        f"all are reduced, got one on '{param.name}'; remove it, or divide by the "
                        "sum of the weights yourself"
                    )

    def _launch(self) -> None:
        self._num_launched = number = self._num_launched + 1
        said = torch.tensor([*self._own, number, number**2], dtype=torch.float64)
        add: Any = dist.ReduceOp.SUM
        self._launched.append((number, SmallAllReduce(said, add, self._root.mesh, _ADDING)))
        self._own, self._has_own = [0.0, 0.0], False

    def _heard(self) -> list[float]:
        """Return what was weighed since the last time, on all ranks: weight and loss.

        Hazard: a rank that has failed before it weighed, and goes on, is heard with the wrong
        microbatch for ever. Guard: ranks say which it is for them. Test:
        ``test_ranks_that_weigh_different_microbatches_hear_of_it``.
        """
        weight = loss = 0.0
        while self._launched:
            number, one = self._launched.pop(0)
            more_weight, more_loss, first, second = one.wait().tolist()
            count = self._root.mesh.num_ranks
            if (first, second) != (count * number, count * number**2):
                self.abandon()
                raise RankMismatchError(
                    f"Expected all ranks to weigh their microbatches in step, got number {number} "
                    "on this rank and another one on some; one has failed before weigh(), or has "
                    "left it out: a rank without a batch weighs 0"
                )
            weight, loss = weight + more_weight, loss + more_loss
        return [weight, loss]

    # Gradients ------------------------------------------------------------------------------

    def _has_divided(self) -> bool:
        """Tell whether gradients that were divided are there still, as they were."""
        if self._is_open:
            return True
        if not self._divided or any(group.freshness.saw_step for group in self._groups):
            return False
        kept = [
            local
            for param, local, version in self._divided
            if reduced(param) is local and local._version == version
        ]
        return any(bool(local.any()) for local in kept)

    def _forget(self) -> None:
        self._total = self._loss = 0.0
        self._divided.clear()
        self._weighed = Weighed()

    def open(self) -> None:
        """Make sums of gradients again that a backward is going to add to."""
        if self._is_open or not (self._divided or self._launched or self._has_own):
            return
        if not self._has_divided():
            self._total = self._loss = 0.0
            self._divided.clear()
        divided = {param: (local, version) for param, local, version in self._divided}
        self._is_open, sums = True, dict[ShardedParam, torch.Tensor]()
        for param in self._params():
            local = reduced(param)
            if local is None:
                continue
            was, version = divided.get(param, (None, 0))
            if local is was and local._version == version:
                sums[param] = local
            else:  # of somebody else's
                assert param.sharded.grad is not None
                self._others.append((param, param.sharded.grad))
                param.sharded.grad = None
        self._scale(sums, lambda num_ranks: num_ranks / self._total)

    @torch.no_grad()
    def close(self) -> None:
        """Divide gradients, if all that is to be reduced is.

        Collective: an all-reduce of 16 bytes if there is a weight that has not been sent.
        """
        if not self._is_open:
            return
        if self._has_own:
            self._launch()
        weight, loss = self._heard()
        total, loss = self._total + weight, self._loss + loss
        failure, self._failure = self._failure, None
        if math.isnan(total):
            self.abandon()
            raise failure or ShardError(
                "Expected weights that are finite and not negative on all ranks, got another one "
                "on some rank"
            )
        self._is_open, self._total, self._loss = False, total, loss
        self._weighed.set(total, loss)
        sums = {param: local for param in self._params() if (local := reduced(param)) is not None}
        if total:
            self._scale(sums, lambda num_ranks: total / num_ranks)
        else:
            for param in sums:
                param.sharded.grad = None
        self._add_others()
        self._divided = [(param, local, local._version) for param, local in sums.items() if total]

    def abandon(self) -> None:
        """Forget what was weighed for a backward that failed."""
        self._launched.clear()
        self._own, self._has_own, self._is_open = [0.0, 0.0], False, False
        self._divided.clear()
        self._add_others()

    def _add_others(self) -> None:
        """Add gradients that were there, and not divided by weights."""
        while self._others:
            param, grad = self._others.pop()
            present = param.sharded.grad
            if present is None:
                param.sharded.grad = grad
            else:
                with torch.no_grad():
                    _torch.local_tensor(present).add_(_torch.local_tensor(grad))

    def _params(self) -> list[ShardedParam]:
        return [param for group in self._groups for param in group.params]

    @torch.no_grad()
    def _scale(
        self, sums: dict[ShardedParam, torch.Tensor], divisor: Callable[[int], float]
    ) -> None:
        """Divide gradients by a number that depends on that of the ranks they are averages over."""
        alike: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
        for param, local in sums.items():
            key = param.mesh.num_ranks, local.device, local.dtype
            alike.setdefault(key, []).append(local)
        for (num_ranks, _, _), locals_ in alike.items():
            _torch.divide_all_(locals_, divisor(num_ranks))
