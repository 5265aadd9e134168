"""All parameters of a group at once: what every forward and backward asks of each of them.

A parameter by itself (``param.py``) costs some calls for each question. Asked of plain lists, which
change only when a tensor is replaced, the same costs a loop or two for the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
from torch import nn
from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.params.extension import has_grad_extension
from composable_shard.core.params.param import ShardedParam, Slot

_version_of = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class ParamSet:
    """The parameters of one group, taken together.

    Attributes:
        accumulators: The nodes that accumulate into the unsharded parameters, but frozen ones.
        readable: The unsharded parameters, and what is freed of those that are subclasses, whose
            version counters autograd compares.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self.accumulators: list[Node] = []
        self.readable: list[torch.Tensor] = []
        self.look_again()

    def look_again(self) -> None:
        """Notice which tensors the parameters are now; needed whenever one was replaced."""
        params = self._params
        for param in params:
            param.encodes_grad = has_grad_extension(param.local)
        self._sharded = [param.sharded for param in params]
        self._locals = [param.local for param in params]
        counted = (*self._sharded, *self._locals)
        self._counted = [tensor for tensor in counted if not tensor.is_inference()]
        self._unsharded = [p.unsharded for p in params if p.unsharded is not None]
        readable = [*self._unsharded, *(part for param in params for part in param.parts)]
        self.readable = [tensor for tensor in readable if not tensor.is_inference()]
        self._first_places = [(param.slots[0].module, param.slots[0].attribute) for param in params]
        self._put_sharded = _pairs(params, self._sharded)
        self._put_unsharded = _pairs(params, self._unsharded) if self.is_created else []
        both = (param.attributes for param in params)
        self._apart = [one for one in both if one is not None and not one.are_shared]
        self._followed: list[bool] | None = None
        self._note_accumulators()

    @property
    def is_created(self) -> bool:
        """Whether the unsharded parameters have been made, by a first gather."""
        return len(self._unsharded) == len(self._params)

    @property
    def is_trainable(self) -> bool:
        """Whether any of them is."""
        return any(map(_requires_grad, self._sharded))

    def version(self) -> int:
        """Return a number that grows when sharded values change in place."""
        with _torch.without_overrides():
            return sum(map(_version_of, self._counted))

    def readable_versions(self) -> list[int]:
        """Return the version counters of ``readable``."""
        return list(map(_version_of, self.readable))

    def are_registered(self, *, unsharded: bool) -> bool:
        """Tell whether the parameters, in the form asked for, stand in their first places."""
        return all(map(is_, self._standing(), self._unsharded if unsharded else self._sharded))

    def are_intact(self) -> bool:
        """Tell whether modules and DTensors still hold what was put there."""
        locals_ = _torch.local_tensors(self._sharded)
        return self.are_registered(unsharded=False) and all(map(is_, locals_, self._locals))

    def register_sharded(self) -> None:
        """Put the sharded parameters into their modules."""
        _put(self._put_sharded)
        for attributes in self._apart:
            attributes.take()

    def register_unsharded(self) -> None:
        """Put the unsharded parameters into their modules."""
        assert self.is_created
        _put(self._put_unsharded)
        for attributes in self._apart:
            attributes.give()

    def follow_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Give the unsharded parameters the ``requires_grad`` of the sharded ones.

        Args:
            on_gradient: Called whenever a backward has accumulated into one of them.
        """
        with _torch.without_overrides():
            wanted = list(map(_requires_grad, self._sharded))
        if wanted != self._followed:
            for param in self._params:
                param.follow_requires_grad(on_gradient)
            self._followed = wanted
            self._note_accumulators()

    def adopt_requires_grad(self) -> None:
        """Give the sharded parameters what users have set on the unsharded ones."""
        followed = self._followed
        if followed is None:
            return
        with _torch.without_overrides():
            asked = list(map(_requires_grad, self._unsharded))
        if asked != followed:
            for param, is_asked, was in zip(self._params, asked, followed, strict=True):
                if is_asked != was:
                    param.sharded.requires_grad_(is_asked)

    def renew_accumulators(self) -> None:
        """Make other nodes that accumulate, at the next ``follow_requires_grad``."""
        for param in self._params:
            param.accumulator = None
        self.accumulators = []  # a tensor makes another node once nobody holds the last
        self._followed = None

    def _standing(self) -> list[nn.Parameter | None]:
        return [module._parameters.get(attribute) for module, attribute in self._first_places]

    def _note_accumulators(self) -> None:
        nodes = (param.accumulator for param in self._params)
        self.accumulators = [node for node in nodes if node is not None]


def _pairs(
    params: Sequence[ShardedParam], tensors: Sequence[nn.Parameter]
) -> list[tuple[Slot, nn.Parameter]]:
    return [
        (slot, tensor)
        for param, tensor in zip(params, tensors, strict=True)
        for slot in param.slots
    ]


def _put(pairs: list[tuple[Slot, nn.Parameter]]) -> None:
    for (module, attribute, calls_setattr), tensor in pairs:
        if calls_setattr:
            setattr(module, attribute, tensor)
        else:
            module._parameters[attribute] = tensor
