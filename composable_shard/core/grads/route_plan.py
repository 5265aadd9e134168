"""Which gradients go together: sorted by dtype, and by who decides what travels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import attrgetter, is_
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.core.grads.encoded_bucket import EncodedBucket, Extensions
from composable_shard.core.grads.grad_bucket import GradBucket
from composable_shard.core.grads.grad_recipes import GradRecipes
from composable_shard.core.grads.route import Route
from composable_shard.core.params.extension import GRAD_PRE, POST
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh

_Members = Sequence[tuple[int, ShardedParam, str | None]]

_grad_dtype_of = attrgetter("grad_dtype")


def promoted(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype that all of them promote to; ``None`` for none, or where there is none."""
    known = {dtype for dtype in dtypes if dtype is not None}
    if len(known) < 2:
        return next(iter(known), None)
    try:
        return reduce(torch.promote_types, known)
    except RuntimeError:  # float8 promotes to nothing
        return None


class RoutePlan:
    """The routes of gradients over one mesh; planned again only when something has changed."""

    def __init__(self, mesh: ShardMesh, recipes: GradRecipes) -> None:
        self._mesh = mesh
        self._recipes = recipes
        self._buckets: dict[Any, GradBucket] = {}
        self._extensions: Extensions = {}
        self._routes: list[Route] = []
        self._are_for: tuple[Any, ...] | None = None
        self._locals: list[torch.Tensor] = []
        self._asked: list[torch.dtype | None] = []
        self._dtypes: list[torch.dtype] = []
        self._take_any: list[int] = []
        self._narrowed: list[int] = []

    def narrows(self, params: Sequence[ShardedParam]) -> list[int]:
        """Return which gradients are rounded before they are reduced in a wider dtype."""
        self._look_at(params)
        return self._narrowed

    def take_any(self, params: Sequence[ShardedParam]) -> list[int]:
        """Return which of the parameters are reduced in whatever dtype their gradients have."""
        self._look_at(params)
        return self._take_any

    def routes_of(
        self, params: Sequence[ShardedParam], held: Sequence[torch.dtype | None]
    ) -> list[Route]:
        """Sort plain gradients, and the inner tensors of others, by the dtype of reduction.

        Those that their tensor types encode go by themselves.

        Args:
            params: The parameters.
            held: Dtypes of the gradients that wait for this reduction, which are not narrowed.
        """
        self._look_at(params)
        key = held, self._recipes.num_agreed
        if key != self._are_for:
            dtypes = [
                one if waiting is None else torch.promote_types(one, waiting)
                for one, waiting in zip(self._dtypes, held, strict=True)
            ]
            self._routes = self._planned(params, dtypes, [self._encodes(param) for param in params])
            self._are_for = key
        return self._routes

    def _look_at(self, params: Sequence[ShardedParam]) -> None:
        """Decide the dtype of each reduction, if parameters or what is asked of them has changed.

        Where the policy has no ``reduce_dtype``, what is asked of one parameter widens them all.
        """
        locals_ = [param.local for param in params]
        with _torch.without_overrides():
            asked = list(map(_grad_dtype_of, [param.sharded for param in params]))
        is_known = len(locals_) == len(self._locals) and all(map(is_, locals_, self._locals))
        if is_known and asked == self._asked:
            return
        self._locals, self._asked, self._are_for = locals_, asked, None
        self._take_any = [index for index, param in enumerate(params) if param.takes_any_grad]
        own = [param.reduction_dtype() for param in params]
        real = promoted(dtype for dtype in own if not dtype.is_complex)
        imaginary = promoted(dtype for dtype in own if dtype.is_complex)
        self._dtypes = [(imaginary if one.is_complex else real) or one for one in own]
        self._narrowed = [
            index
            for index, (param, dtype) in enumerate(zip(params, own, strict=True))
            if dtype != self._dtypes[index] and dtype.itemsize < param.compute_dtype.itemsize
        ]

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
