"""Which gradients go together: sorted by dtype, and by who decides what travels."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from composable_shard.core.grads.encoded_bucket import EncodedBucket, Extensions
from composable_shard.core.grads.grad_bucket import GradBucket
from composable_shard.core.grads.grad_recipes import GradRecipes
from composable_shard.core.grads.route import Route
from composable_shard.core.params.extension import GRAD_PRE, POST
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

_Members = Sequence[tuple[int, ShardedParam, str | None]]


class RoutePlan:
    """The routes of gradients over one mesh; planned again only when something has changed."""

    def __init__(self, mesh: ShardMesh, policy: MixedPrecisionPolicy, recipes: GradRecipes) -> None:
        self._mesh = mesh
        self._policy = policy
        self._recipes = recipes
        self._buckets: dict[Any, GradBucket] = {}
        self._extensions: Extensions = {}
        self._routes: list[Route] = []
        self._are_for: tuple[Any, ...] | None = None
        self._locals: list[torch.Tensor] = []

    def routes_of(
        self, params: Sequence[ShardedParam], held: Sequence[torch.dtype | None]
    ) -> list[Route]:
        """Sort plain gradients, and the inner tensors of others, by the dtype of reduction.

        Those that their tensor types encode go by themselves.

        Args:
            params: The parameters.
            held: Dtypes of the gradients that wait for this reduction, which are not narrowed.
        """
        locals_ = [param.local for param in params]
        key = len(params), held, self._recipes.num_agreed
        if key != self._are_for or not all(map(is_, locals_, self._locals)):
            own = [self._policy.reduction_dtype(local.dtype) for local in locals_]
            dtypes = [
                one if waiting is None else torch.promote_types(one, waiting)
                for one, waiting in zip(own, held, strict=True)
            ]
            self._routes = self._planned(params, dtypes, [self._encodes(param) for param in params])
            self._are_for, self._locals = key, locals_
        return self._routes

    def release(self) -> None:
        """Free what was packed for reductions and is no longer read."""
        for bucket in self._buckets.values():
            bucket.release()

    def _planned(
        self, params: Sequence[ShardedParam], dtypes: list[torch.dtype], encodes: list[bool]
    ) -> list[Route]:
        members: dict[tuple[torch.dtype, bool], list[tuple[int, ShardedParam, str | None]]] = {}
        for index, param in enumerate(params):
            recipe = self._recipes.of(param)
            if recipe is not None and encodes[index]:
                raise ExtensionError(
                    f"Expected a plain gradient of {param.name} to pass to {GRAD_PRE}, got "
                    f"{recipe.kind.__name__}; let {POST} return a plain tensor"
                )
            for name in recipe.names if recipe else (None,):
                key = dtypes[index], encodes[index]
                members.setdefault(key, []).append((index, param, name))
        rank = self._mesh.shard_rank
        return [Route(self._bucket(*key, some), some, rank) for key, some in members.items()]

    def _encodes(self, param: ShardedParam) -> bool:
        return param.encodes_grad and self._mesh.num_shards > 1 and param.layout.numel > 0

    def _bucket(self, dtype: torch.dtype, encodes: bool, members: _Members) -> GradBucket:
        params = tuple(param for _, param, _ in members)
        layouts = tuple(param.layout for param in params)
        key = params if encodes else layouts, dtype
        bucket = self._buckets.get(key)
        if bucket is None and encodes:
            bucket = EncodedBucket(params, self._mesh, dtype, self._extensions)
        elif bucket is None:
            bucket = GradBucket(layouts, self._mesh.num_shards, dtype, self._mesh.device)
        return self._buckets.setdefault(key, bucket)
