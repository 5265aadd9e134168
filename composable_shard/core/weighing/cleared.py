"""Which of the gradients that wait for their reduction have been cleared, and when.

What microbatches without sync weigh is not known before the reduction, nor is it the same on all
ranks which of them has a gradient. So each notes what it sees, by the number of microbatches that
had been weighed then. If any of them saw something, they tell each other everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from composable_shard import _torch
from composable_shard.core.param import ShardedParam

_MARK = "_composable_shard_left"


class Seen(NamedTuple):
    """What a rank saw, parameters by their numbers.

    Attributes:
        begun: Before which microbatch a gradient was begun, that is there now.
        cleared: Which were cleared, and before which microbatch that was seen.
    """

    begun: dict[int, int]
    cleared: list[tuple[int, int]]


class Beginnings:
    """Before which microbatch gradients were begun, as all ranks know it.

    Args:
        seen: What each of them saw.

    Attributes:
        cuts: Before which microbatches anything was cleared.
    """

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._begun: dict[int, int] = {}
        for one in seen:
            for number, place in one.begun.items():
                self._begun[number] = min(place, self._begun.get(number, place))
        every = (pair for one in seen for pair in one.cleared)
        # Zeros on one rank are no clearing if another one has had the gradient all the time.
        self.cuts = sorted({at for number, at in every if self._begun.get(number, at) >= at})

    def of(self, number: int) -> int:
        """Return from which microbatch on a parameter's gradient counts; 0 if as ever."""
        begun = self._begun.get(number)
        return max((cut for cut in self.cuts if begun is None or cut <= begun), default=0)


class Left:
    """The gradients of this rank that wait for their reduction.

    Attributes:
        num_ended: How many microbatches have been weighed for backwards that have ended, since the
            sum of all was heard last.
    """

    def __init__(self) -> None:
        self.num_ended = 0
        self._begun: dict[ShardedParam, int] = {}
        self._cleared: list[tuple[ShardedParam, int]] = []
        self._looked_at: set[ShardedParam] = set()  # by the backward that runs

    @property
    def saw_any(self) -> bool:
        """Whether any has been cleared."""
        return bool(self._cleared)

    def begin_backward(self) -> None:
        """Note that gradients may have been cleared since the last backward."""
        self._looked_at.clear()

    def look_at(self, params: Iterable[ShardedParam]) -> None:
        """Note which of some were cleared: not there any more, or zeros of another version.

        Each is looked at once in a backward, which may add to it several times.
        """
        for param in params:
            is_known = param in self._looked_at
            self._looked_at.add(param)
            if not is_known and param in self._begun and _is_cleared(param):
                del self._begun[param]
                self._cleared.append((param, self.num_ended))

    def end_backward(self, params: Iterable[ShardedParam], num_weighed: int) -> None:
        """Mark what a backward has left.

        Args:
            params: With gradients that are to be reduced, or divided, later.
            num_weighed: How many microbatches have been weighed by now.
        """
        for param in params:
            grad: Any = param.sharded.grad
            vars(grad)[_MARK] = _versions(grad)
            self._begun.setdefault(param, self.num_ended)
        self.num_ended = num_weighed

    def seen(self, numbers: dict[ShardedParam, int]) -> Seen:
        """Return what this rank saw, parameters by their numbers."""
        begun = {numbers[param]: place for param, place in self._begun.items()}
        return Seen(begun, [(numbers[param], place) for param, place in self._cleared])

    def begin_anew(self, params: Iterable[ShardedParam] = ()) -> None:
        """Count from here on, without some parameters that are reduced now."""
        reduced = {*params}
        self._begun = {param: 0 for param in self._begun if param not in reduced}
        self._cleared, self.num_ended = [], 0


def _is_cleared(param: ShardedParam) -> bool:
    grad: Any = param.sharded.grad
    versions = None if grad is None else vars(grad).get(_MARK)
    if versions is None:
        return True
    return versions != _versions(grad) and not bool(_torch.local_tensor(grad).any())


def _versions(grad: Any) -> tuple[int, int]:
    return grad._version, _torch.local_tensor(grad)._version
