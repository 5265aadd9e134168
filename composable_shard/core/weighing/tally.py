"""Adding up, over all ranks, what their microbatches weigh."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable_shard.core.transport.process_groups import SmallAllReduce, gather_objects
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


class Heard(NamedTuple):
    """What was weighed by all ranks.

    Attributes:
        sum: All of it.
        seen: What ranks saw of which others have to hear; nothing if none saw anything.
        parts: The sums of each microbatch; only if any rank saw anything.
    """

    sum: Sum
    seen: Sequence[Any] = ()
    parts: Sequence[Sum] = ()


class Tally:
    """Adds up what the ranks of a mesh weigh.

    Hazard: a rank that has failed before its backward, and goes on, is heard with the wrong
    microbatch for ever. Guard: ranks say which it is for them; all are the same if the square of
    the sum of these numbers is what the sum of their squares says. Test:
    ``test_ranks_that_weigh_different_microbatches_hear_of_it``.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights and losses
        self._num_said = 0  # of these
        self._sums: list[SmallAllReduce] = []
        self._num_heard = 0

    @property
    def num_noted(self) -> int:
        """How many microbatches this rank has weighed that it has not heard of."""
        return len(self._noted)

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
        self._noted.append(both)

    def say(self, *, saw_any: bool = False) -> None:
        """Launch the sum of what was noted, if anything was.

        Args:
            saw_any: Whether this rank saw something that all have to hear of.

        Collective: an all-reduce of 56 bytes that is not waited for, or none.
        """
        unsaid = self._noted[self._num_said :]
        if not unsaid:
            return
        weights, losses = (torch.stack(each) for each in zip(*unsaid, strict=True))
        is_weight = weights.isfinite() & (weights >= 0)
        number = self._num_heard + len(self._sums) + 1
        said = weights.new_tensor([0, 0, len(losses), saw_any, 1, number, number**2])
        said[0], said[1] = weights.where(is_weight, math.nan).sum(), losses.sum()
        self._sums.append(_sum_of(said, self._mesh))
        self._num_said = len(self._noted)

    def forget(self) -> None:
        """Forget what was noted and what was said."""
        self._num_heard += len(self._sums)
        self._noted, self._num_said, self._sums = [], 0, []

    def hear(self, seen: Any = None) -> Heard:
        """Say what was not said; wait for what all ranks weigh, and return it.

        Args:
            seen: What this rank saw of which others have to hear; ``None`` if it saw nothing.

        Raises:
            ValueError, ShardError, RankMismatchError: See weigh.

        Collective: what ``say`` does, and two all-gathers if any rank saw anything.
        """
        self.say(saw_any=seen is not None)
        heard, number, num_seen = Sum(), self._num_heard, 0.0
        sums, noted = self._sums, self._noted
        self.forget()
        for one in sums:
            weight, loss, num, saw_any, num_ranks, *numbers = one.wait()
            number += 1
            if numbers != [num_ranks * number, num_ranks * number**2]:
                raise RankMismatchError(
                    f"Expected all ranks to weigh their microbatches in step, got number {number} "
                    "on this rank and another one on some; one has failed before its backward, or "
                    "has left weigh() out: a rank without a batch weighs 0"
                )
            heard = heard.plus(Sum(weight, loss, int(num)))
            num_seen += saw_any
        if not math.isfinite(heard.weight):
            _refuse(weight for weight, _ in noted)
        if not num_seen:
            return Heard(heard)
        own = [Sum(float(weight), float(loss), 1) for weight, loss in noted]
        told = self._gather((seen, own))
        return Heard(heard, [theirs for theirs, _ in told if theirs is not None], [*_added(told)])

    def _gather(self, said: Any) -> list[Any]:
        """Return what all ranks say. Collective: an all-gather for each axis of the mesh."""
        heard = [said]
        for group in self._mesh.process_groups:
            heard = [one for theirs in gather_objects(heard, group, _ADDING) for one in theirs]
        return heard

    def agree_on_any(self, flags: Sequence[bool]) -> list[bool]:
        """Tell for each flag whether it is set on any rank. Collective: an all-reduce."""
        said = torch.tensor(flags, dtype=torch.float64, device=self._mesh.device)
        return [bool(one) for one in _sum_of(said, self._mesh).wait()]


def _added(told: Iterable[tuple[Any, Sequence[Sum]]]) -> Iterator[Sum]:
    """Yield the sums of the first microbatches of all ranks, of the second ones, and so on."""
    for several in itertools.zip_longest(*(own for _, own in told), fillvalue=Sum()):
        yield functools.reduce(Sum.plus, several)


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
