"""Gradients that are tensor subclasses: taken apart, reduced inner tensor by inner tensor, rebuilt.

Which inner tensors there are is known where there is a gradient; the ranks without one are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.core.comms.objects import gather_objects
from composable_shard.core.params.param import ShardedParam
from composable_shard.mesh import ShardMesh


@dataclass(frozen=True)
class SubclassRecipe:
    """How the gradient of a tensor subclass is rebuilt from its reduced inner tensors."""

    kind: type
    names: tuple[str, ...]
    context: Any

    def rebuild(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Make the gradient out of inner tensors."""
        like = parts[self.names[0]]
        rebuilt: torch.Tensor = self.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            parts, self.context, like.shape, like.stride()
        )
        return rebuilt


class GradRecipes:
    """The recipes of some parameters, on which their ranks have agreed."""

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh
        self._recipes: dict[ShardedParam, SubclassRecipe | None] = {}

    def of(self, param: ShardedParam) -> SubclassRecipe | None:
        """Return how the gradient of ``param`` is rebuilt, ``None`` for a plain one."""
        return self._recipes.get(param)

    @property
    def num_agreed(self) -> int:
        """Of how many parameters it is known; never falls."""
        return len(self._recipes)

    def agree(self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]) -> None:
        """Agree once which gradients are tensor subclasses, made of which inner tensors.

        Collective: one all-gather of a small object for each parameter whose unsharded form is a
        subclass, until some rank had a gradient for it.
        """
        for param, grad in zip(params, grads, strict=True):
            if not param.is_subclass or param in self._recipes:
                continue
            said = _recipe_of(grad)
            for group in (self._mesh.shard_group, self._mesh.replica_group):
                if group is not None and group.size() > 1:
                    heard = gather_objects(said, group, "agreeing on what gradients are made of")
                    said = next((recipe for recipe in heard if recipe is not None), None)
            if said is not None:
                self._recipes[param] = said if said.names else None


def _recipe_of(grad: torch.Tensor | None) -> SubclassRecipe | None:
    """Describe a gradient's inner tensors (none for a plain one); ``None`` if there is none."""
    if grad is None:
        return None
    if not _torch.is_wrapper_subclass(grad):
        return SubclassRecipe(torch.Tensor, (), None)
    names, context = grad.__tensor_flatten__()  # type: ignore[attr-defined]
    return SubclassRecipe(type(grad), tuple(names), context)
