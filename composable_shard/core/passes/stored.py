"""What forward stores away on its modules, such as a loss to be added later."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.passes.nested import holds_nothing, tensors_stored_in

_ATTRIBUTES_WITHOUT_GRAPH = frozenset({*nn.Module().__dict__, _torch.COMPOSABLE_STATE})


class StoredTensors:
    """Finds the tensors with a graph that appear in the attributes of some modules.

    Most modules store nothing and keep their attributes from call to call. Those values that cannot
    hold a tensor are remembered, so that a look at such a module is one comparison of two lists.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._harmless: list[list[Any]] = [[] for _ in modules]
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def newly(self) -> list[torch.Tensor]:
        """Return those that were not there at the last call."""
        suspects: list[Any] = []
        for place, module in enumerate(self._modules):
            attributes, harmless = module.__dict__, self._harmless[place]
            if len(attributes) != len(harmless) or not all(
                map(operator.is_, attributes.values(), harmless)
            ):
                self._harmless[place] = self._sort(attributes, suspects)
        if not suspects and not self._known:
            return []
        known, self._known = self._known, {}
        seen: set[int] = set()
        found = []
        for value in suspects:
            for tensor in tensors_stored_in(value, seen):
                if tensor.grad_fn is None:
                    continue
                before = known.get(id(tensor))
                self._known[id(tensor)] = weakref.ref(tensor)
                if before is None or before() is not tensor:
                    found.append(tensor)
        return found

    def _sort(self, attributes: dict[str, Any], suspects: list[Any]) -> list[Any]:
        """Add to ``suspects`` what may hold tensors; return the values, with ``self`` for those."""
        harmless: list[Any] = []
        for name, value in attributes.items():
            if name in _ATTRIBUTES_WITHOUT_GRAPH or holds_nothing(value):
                harmless.append(value)
            else:
                harmless.append(self)  # is no attribute of a module: it will be looked into again
                suspects.append(value)
        return harmless
