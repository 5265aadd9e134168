"""What autograd still has to do for one group in the backward that is running."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.group import ParamGroup

_INNER = -2
"""Stands for the number of a backward that an activation checkpoint is going to begin."""


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


class InputMarker:
    """An identity in front of a module, whose node runs when all of the module's nodes have.

    Hazard: a graph that never runs backward stays alive as long as somebody refers to its nodes.
    Guard: only the hooks on the module's outputs refer to a marker, so they die together; the
    node itself refers to the token alone, or it would keep itself alive.

    Attributes:
        node: The node of the identity.
        token: Says in which backward it is waited for.
    """

    __slots__ = ("__weakref__", "node", "token")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.token = Token()


class Token:
    """Says in which backward an input marker is waited for."""

    __slots__ = ("backward",)

    def __init__(self) -> None:
        self.backward = -1


class GroupRun:
    """How far the running backward has come with one group.

    A checkpoint may run a backward inside a backward: the group is complete when no node is pending
    in any of them.

    Attributes:
        pending: By the number of each backward, how many nodes of autograd are left to run in it.
        is_gathered: Whether its parameters were gathered, where backward reads them.
        is_bounded: Whether input markers lie in front of all calls that the backward goes through.
            If not, nodes that read a parameter detached may run after its last gradient.
        is_complete: Whether all of its gradients are there.
        is_reduced: Whether its turn to be reduced has come.
        num_computed_again: How often a checkpoint has computed it again.
    """

    def __init__(self, group: ParamGroup, *, is_inside: bool) -> None:
        self.pending: dict[int, int] = {}
        self.is_gathered = False
        self.is_bounded = True
        self.is_complete = False
        self.is_reduced = False
        self.num_computed_again = 0
        self._group = group
        # Within a forward more changes than the count when a gradient is there.
        group.to_arrive = {} if is_inside else self.pending

    @property
    def is_waiting(self) -> bool:
        """Whether autograd has nodes of the group to run."""
        return any(count > 0 for count in self.pending.values())

    def enter(self, backward: int) -> None:
        """Count the accumulations that are part of the backward, if that is not done."""
        if backward not in self.pending:
            self.pending.pop(_INNER, None)
            self.pending[backward] = _torch.num_to_run(self._group.units.all.accumulators)

    def compute_again(self) -> None:
        """Note that a checkpoint computes the group again.

        A reentrant one then runs a backward of its own, whose nodes are not known yet.
        """
        self.num_computed_again += 1
        if not self.is_waiting:
            self.pending[_INNER] = 1

    def stop_expecting_inner(self) -> None:
        """Note that the running backward has left the checkpoint that computed the group again."""
        self.pending.pop(_INNER, None)

    def expect_markers(self, backward: int) -> int:
        """Wait for the input markers of all calls, as one call of the module has been reached.

        Hazard: a rank whose loss uses no parameter would be done after one call, and gather again
        for the next; another has waited for its gradients, and gathers once. Guard: all calls that
        the backward goes through are waited for. Test:
        ``test_ranks_that_reach_other_parts_train_alike``.

        Returns:
            How many there are that were not expected before.
        """
        num_new = 0
        for marker in self._group.input_markers:
            if marker.token.backward != backward and _torch.will_run(marker.node):
                marker.token.backward = backward
                num_new += 1
        self.pending[backward] += num_new
        return num_new

    def count(self, backward: int) -> bool:
        """Count one node down; return whether the group is complete."""
        self.pending[backward] -= 1
        return not self.is_waiting
