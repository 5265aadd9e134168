"""What autograd calls when it has accumulated into an unsharded parameter."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.errors import ShardError


class Arrival:
    """Told that autograd has accumulated into an unsharded parameter of a group.

    It hangs on the parameter, which the group holds together with the node that accumulates into
    it, a circle that no garbage collection sees. So it does not hold the group: without a graph
    nothing arrives, and a graph holds the groups it goes through.
    """

    __slots__ = ("_group",)

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)

    @property
    def group(self) -> ParamGroup | None:
        """The group, while it lives."""
        return self._group()

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrival | None:
        group = self._group()
        return None if group is None else Arrival(copy.deepcopy(group, memo))

    def __call__(self, *_: object) -> None:
        group = self._group()
        if group is None:
            return
        if torch.is_grad_enabled():
            raise ShardError(
                f"Expected a backward into the parameters of {group.label} without "
                "create_graph=True, got one with it, whose graph ends where gradients are reduced; "
                "take gradients of inputs by torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        left, backward = group.to_arrive, _torch.current_backward()
        more = left.get(backward, 0)
        if more > 1:  # as of most: that it is counted is all that happens
            left[backward] = more - 1
            return
        with _torch.apart_from_transforms():
            group.context.backward.count(group)
