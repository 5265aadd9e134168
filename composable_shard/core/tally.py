"""Adding up, over all ranks, what their microbatches weigh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.errors import RankMismatchError, ShardError
from composable_shard.mesh import ShardMesh

_ADDING = "adding what microbatches weigh"


class Sum(NamedTuple):
    """What was weighed: the sums of the weights and of the losses, and how often, by all ranks."""

    weight: float = 0.0
    loss: float = 0.0
    num: int = 0

    def plus(self, other: Sum) -> Sum:
        return Sum(self.weight + other.weight, self.loss + other.loss, self.num + other.num)


class Tally:
    """Adds up what the ranks of a mesh weigh.

    Hazard: a rank that has failed before its backward, and goes on, is heard with the wrong
    microbatch for ever. Guard: ranks say which it is for them; all are the same if the square of
    the sum of these numbers is what the sum of their squares says. Test:
    ``test_ranks_that_weigh_different_microbatches_hear_of_it``.

    Attributes:
        has_any: Whether this rank has weighed something that it has not heard of.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh
        self._unsaid: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights and losses
        self._said: list[torch.Tensor] = []  # weights
        self._sums: list[SmallAllReduce] = []
        self._num_heard = 0

    @property
    def has_any(self) -> bool:
        return bool(self._unsaid or self._sums)

    def note(self, weight: float | torch.Tensor, loss: torch.Tensor | None) -> None:
        """Note what a microbatch of this rank weighs.

        Raises:
            TypeError, ValueError: See weigh.
        """
        device = self._mesh.device
        both = (
            _number(weight, "weight", device),
            _number(0.0 if loss is None else loss, "loss", device),
        )
        self._unsaid.append(both)

    def say(self) -> None:
        """Launch the sum of what was noted, if anything was.

        Collective: an all-reduce of 48 bytes that is not waited for, or none.
        """
        if not self._unsaid:
            return
        weights, losses = (torch.stack(each) for each in zip(*self._unsaid, strict=True))
        is_weight = weights.isfinite() & (weights >= 0)
        number = self._num_heard + len(self._sums) + 1
        said = weights.new_tensor([0, 0, len(losses), 1, number, number**2])
        said[0], said[1] = weights.where(is_weight, math.nan).sum(), losses.sum()
        self._sums.append(_sum_of(said, self._mesh))
        self._said += weights
        self._unsaid = []

    def forget(self) -> None:
        """Forget what was noted and what was said."""
        self._num_heard += len(self._sums)
        self._unsaid, self._said, self._sums = [], [], []

    def hear(self) -> Sum:
        """Say what was not said; wait for what all ranks weigh, and return it.

        Raises:
            ValueError, ShardError, RankMismatchError: See weigh.

        Collective: what ``say`` does.
        """
        self.say()
        heard, number = Sum(), self._num_heard
        sums, said = self._sums, self._said
        self.forget()
        for one in sums:
            weight, loss, num, num_ranks, *numbers = one.wait()
            number += 1
            if numbers != [num_ranks * number, num_ranks * number**2]:
                raise RankMismatchError(
                    f"Expected all ranks to weigh their microbatches in step, got number {number} "
                    "on this rank and another one on some; one has failed before its backward, or "
                    "has left weigh() out: a rank without a batch weighs 0"
                )
            heard = heard.plus(Sum(weight, loss, int(num)))
        if not math.isfinite(heard.weight):
            _refuse(said)
        return heard

    def agree_on_any(self, flags: Sequence[bool]) -> list[bool]:
        """Tell for each flag whether it is set on any rank. Collective: an all-reduce."""
        said = torch.tensor(flags, dtype=torch.float64, device=self._mesh.device)
        return [bool(one) for one in _sum_of(said, self._mesh).wait()]


def _number(given: Any, what: str, device: torch.device) -> torch.Tensor:
    """Return a copy of a number as it is now, as a scalar of ``float64``."""
    if isinstance(given, DTensor):
        given = given.full_tensor()
    is_tensor = isinstance(given, torch.Tensor)
    number = given.detach() if is_tensor else torch.tensor(float(given), dtype=torch.float64)
    if number.numel() != 1 or number.is_complex():
        raise ValueError(
            f"Expected a {what} that is one real number, got {number.dtype} of shape "
            f"{list(number.shape)}"
        )
    return number.reshape(()).to(device, torch.float64, copy=True)


def _sum_of(said: torch.Tensor, mesh: ShardMesh) -> SmallAllReduce:
    add: Any = dist.ReduceOp.SUM
    return SmallAllReduce(said, add, mesh, _ADDING)


def _refuse(weights: Iterable[torch.Tensor]) -> NoReturn:
    """Raise for a weight that is no number to weigh, of this rank or of another."""
    for given in map(float, weights):
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"Expected a weight that is finite and not negative, got {given}")
    raise ShardError(
        "Expected weights that are finite and not negative on all ranks, got another one on some "
        "rank"
    )
