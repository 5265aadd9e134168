"""Which nodes of autograd a group still waits for in the backward that is running."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.group import ParamGroup

_TO_THE_END = 1 << 62
"""More nodes than there are: what is waited for ends with the backward."""


class End:
    """Called at the end of a backward; dies without being called if the backward fails.

    Attributes:
        has_failed: Whether it was called and raised: then who keeps the exception keeps it alive.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.has_failed = False
        self._on_end = on_end

    def __call__(self) -> None:
        try:
            with _torch.apart_from_transforms():
                self._on_end()
        except BaseException:
            self.has_failed = True
            raise


class Boundary:
    """An identity in front of a module, whose node runs when all of the module's nodes have.

    Hazard: a graph that never runs backward stays alive as long as somebody refers to its nodes.
    Guard: only the hooks on the module's outputs refer to a boundary, so they die together; the
    node itself refers to the token alone, or it would keep itself alive.
    """

    __slots__ = ("__weakref__", "node", "token")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.token = Token()


class Token:
    """Says in which backward a boundary is waited for."""

    __slots__ = ("backward",)

    def __init__(self) -> None:
        self.backward = -1


class Countdown:
    """How many autograd nodes of one group each running backward has left to run.

    A checkpoint may run a backward inside a backward: the group is complete when none is left in
    any of them. A backward that reaches the group but none of its nodes keeps it open to its end.

    Attributes:
        left: By backward, how many.
        is_bounded: Whether boundaries lie in front of all calls that the backward goes through. If
            not, nodes that read a parameter detached may run when the group is complete.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.is_bounded = True
        self.left: dict[int, int] = {}
        self._boundaries = group.boundaries
        self._params = group.units.all
        self._num_params = len(group.params)
        self._is_partial = False  # some parameter gets no gradient from the innermost backward

    def num_to_arrive(self) -> int:
        """Return how many accumulations are part of the innermost running backward."""
        return _torch.num_to_run(self._params.accumulators)

    def enter(self, backward: int) -> None:
        if backward not in self.left:
            self.left[backward] = self.num_to_arrive()
            self._is_partial = self.left[backward] < self._num_params

    def expect(self, backward: int, *, is_bounded: bool) -> None:
        """Wait for the boundaries of all calls, as one call of the module has been reached.

        Hazard: a rank whose loss uses no parameter would be done after one call, and gather again
        for the next; another has waited for its gradients, and gathers once. Guard: all calls that
        the backward goes through are waited for. Test:
        ``test_ranks_of_which_one_uses_nothing_of_a_module_that_is_called_twice``.

        Args:
            backward: The backward.
            is_bounded: Whether the call that was reached has any. If not, and with a parameter that
                gets no gradient, nothing tells when autograd is done with that parameter: the group
                is kept open to the end.
        """
        for boundary in self._boundaries:
            if boundary.token.backward != backward and _torch.will_run(boundary.node):
                boundary.token.backward = backward
                self.left[backward] += 1
        if not is_bounded:
            self.is_bounded = False
            if self._is_partial:
                self.left[backward] = _TO_THE_END

    def arrive(self, backward: int) -> bool:
        """Count one node down; return whether the group is complete."""
        self.left[backward] -= 1
        if self.left[backward] > 0:
            return False
        del self.left[backward]
        return not self.left


class Countdowns(dict[ParamGroup, Countdown]):
    """The countdowns of the groups that the running backward has reached."""

    def of(self, group: ParamGroup, *, is_inside: bool) -> Countdown:
        """Return that of a group; a new one if there is none yet.

        Args:
            group: The group.
            is_inside: Whether the backward lies within a forward, where more than the count changes
                when a gradient arrives.
        """
        countdown = self.get(group)
        if countdown is None:
            countdown = self[group] = Countdown(group)
            group.to_arrive = {} if is_inside else countdown.left
        return countdown

    def clear(self) -> None:
        """Forget all; what arrives later is not counted."""
        for group in self:
            group.to_arrive = {}
        super().clear()
