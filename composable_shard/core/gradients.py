"""From the gradients that autograd leaves on unsharded parameters to those the optimizer sees.

A gradient's placement is its state, and it is always visible on the sharded parameter: ``None``,
``Partial`` (accumulated on this rank, not reduced) or the parameter's own placement (reduced).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.collectives import ReduceScatter
from composable_shard.core.grad_bucket import GradBucket, GradTransfer
from composable_shard.core.param import ShardedParam
from composable_shard.core.scale import ReductionScale, plan_scale
from composable_shard.core.streams import Pending
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy


@dataclass(frozen=True)
class SubclassRecipe:
    """How the gradient of a tensor subclass is rebuilt from its reduced inner tensors."""

    kind: type
    names: tuple[str, ...]
    context: Any


class _Member(NamedTuple):
    """One plain tensor to reduce: a gradient, or the inner tensor ``inner`` of one."""

    param: ShardedParam
    inner: str | None
    grad: torch.Tensor | None


@dataclass
class _Reduction:
    """A launched reduce-scatter: a bucket, its transfer, and whose gradients it carries."""

    bucket: GradBucket
    transfer: GradTransfer
    members: list[tuple[ShardedParam, str | None]]
    scale: ReductionScale


class GroupGradients:
    """Accumulates, reduces and hands out the gradients of one group.

    Attributes:
        pending: The launched reduction, until :meth:`finish`.
        reduce_scatter: The collective to use.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        reduce_scatter: ReduceScatter,
    ) -> None:
        self.pending: Pending | None = None
        self.reduce_scatter = reduce_scatter
        self._params = list(params)
        self._mesh = mesh
        self._policy = policy
        self._reductions: list[_Reduction] = []
        self._buckets: dict[Any, GradBucket] = {}
        self._recipes: dict[str, SubclassRecipe | None] = {}

    # Without sync ---------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Add the unsharded gradients to what is not yet reduced. Collective: none."""
        self.finish()
        if self._mesh.num_shards == 1:
            self.reduce()
            return
        for param in self._params:
            grad = _take_unsharded(param)
            if grad is None:
                continue
            total = self._partial(param)
            if total is None:
                dtype = self._policy.reduction_dtype(param.local.dtype)
                local = grad.to(dtype)
                assign_grad(param.sharded, _torch.from_local(local, param.partial_spec(dtype)))
            else:
                total.add_(grad)
        self._fold_narrow_reductions()

    def has_partial(self) -> bool:
        """Tell whether any parameter has a gradient that is not reduced."""
        return any(is_partial(param.sharded.grad) for param in self._params)

    def _partial(self, param: ShardedParam) -> torch.Tensor | None:
        """Return the unsharded sum to add to; a reduced gradient is turned into one."""
        grad = param.sharded.grad
        if grad is None:
            return None
        if not is_partial(grad):
            self._fold(param, grad)
        grad = param.sharded.grad
        assert grad is not None
        return _torch.local_tensor(grad)

    def _fold(self, param: ShardedParam, reduced: torch.Tensor) -> None:
        """Express a reduced gradient as one that still has to be averaged.

        The mean over ranks of "N times my rows, zero elsewhere" is the reduced gradient. It keeps
        its dtype if that is the wider one, and the next reduction is taken in it.
        """
        local = _torch.local_tensor(reduced)
        dtype = torch.promote_types(local.dtype, self._policy.reduction_dtype(local.dtype))
        full = local.new_zeros(param.layout.shape, dtype=dtype)
        param.shard_of(full).copy_(local).mul_(self._mesh.num_shards)
        assign_grad(param.sharded, _torch.from_local(full, param.partial_spec(dtype)))

    def _fold_narrow_reductions(self) -> None:
        """Fold the reduced gradients that the next reduction would round.

        Which parameters a rank used may differ between ranks; the dtype of the next reduction must
        not, so they are folded whether or not this rank added to them.
        """
        for param in self._params:
            grad = param.sharded.grad
            if grad is None or is_partial(grad):
                continue
            if self._policy.reduction_dtype(param.local.dtype) != grad.dtype:
                self._fold(param, grad)

    # With sync ------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Launch the reduction of everything that is not yet reduced.

        Collective: one reduce-scatter launch for each reduction dtype; all ranks must call it,
        with or without gradients of their own.
        """
        self.finish()
        trainable = [param for param in self._params if param.sharded.requires_grad]
        dtypes = [self._reduce_dtype(param) for param in trainable]
        grads = [self._take(param) for param in trainable]
        if self._mesh.num_shards == 1:
            for param, grad in zip(trainable, grads, strict=True):
                if grad is not None:
                    self._deliver(param, grad.to(self._grad_dtype(param)))
            return
        self._agree_recipes(trainable, grads)
        works, owned = [], []
        for dtype, members in self._members(trainable, grads, dtypes).items():
            reduction = self._start(dtype, members)
            works += self._launch(reduction)
            owned += [*reduction.transfer.inputs, reduction.transfer.result]
            self._reductions.append(reduction)
        self.pending = Pending(works, owned)

    def finish(self) -> None:
        """Wait for the launched reduction and put its results on the sharded parameters."""
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            self._hand_out(reduction)

    def discard(self) -> None:
        """Wait for the launched reduction and drop it, and all unsharded gradients."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        self._reductions.clear()
        for param in self._params:
            _take_unsharded(param)

    def discard_partial(self) -> None:
        """Drop the gradients that are accumulated but not reduced."""
        for param in self._params:
            if is_partial(param.sharded.grad):
                param.sharded.grad = None

    def _take(self, param: ShardedParam) -> torch.Tensor | None:
        grad, total = _take_unsharded(param), param.sharded.grad
        if not is_partial(total):
            return grad
        assert total is not None
        param.sharded.grad = None
        local = _torch.local_tensor(total)
        return local if grad is None else local.add_(grad)

    def _reduce_dtype(self, param: ShardedParam) -> torch.dtype:
        own = self._policy.reduction_dtype(param.local.dtype)
        total = param.sharded.grad
        if total is None or not is_partial(total):
            return own
        return torch.promote_types(own, total.dtype)

    def _members(
        self,
        params: Sequence[ShardedParam],
        grads: Sequence[torch.Tensor | None],
        dtypes: Sequence[torch.dtype],
    ) -> dict[torch.dtype, list[_Member]]:
        """Sort plain gradients, and the inner tensors of others, by the dtype of reduction."""
        members: dict[torch.dtype, list[_Member]] = {}
        for param, grad, dtype in zip(params, grads, dtypes, strict=True):
            recipe = self._recipes.get(param.name)
            names: tuple[str | None, ...] = recipe.names if recipe else (None,)
            for name in names:
                inner = grad if grad is None or name is None else getattr(grad, name)
                members.setdefault(dtype, []).append(_Member(param, name, inner))
        return members

    def _start(self, dtype: torch.dtype, members: list[_Member]) -> _Reduction:
        layouts = tuple(member.param.layout for member in members)
        bucket = self._buckets.get((layouts, dtype))
        if bucket is None:
            bucket = GradBucket(layouts, self._mesh.num_shards, dtype, self._mesh.device)
            self._buckets[layouts, dtype] = bucket
        averages = self.reduce_scatter.averages(self._mesh.group, self._mesh.device)
        scale = plan_scale(self._mesh.num_shards, dtype, can_average=averages)
        transfer = bucket.start_reduce([member.grad for member in members])
        if scale.before != 1:
            _torch.divide_all_(transfer.inputs, scale.before)
        places = [(member.param, member.inner) for member in members]
        return _Reduction(bucket, transfer, places, scale)

    def _launch(self, reduction: _Reduction) -> list[Any]:
        op = dist.ReduceOp.AVG if reduction.scale.averages else dist.ReduceOp.SUM
        transfer = reduction.transfer
        return self.reduce_scatter.launch(transfer.outputs, transfer.inputs, self._mesh.group, op)

    def _hand_out(self, reduction: _Reduction) -> None:
        bucket, transfer = reduction.bucket, reduction.transfer
        wanted = bucket.anybody_has(transfer)
        reduced = transfer.result
        if reduction.scale.after != 1:
            reduced.div_(reduction.scale.after)
        dtypes = {self._grad_dtype(param) for param, _ in reduction.members}
        if len(dtypes) == 1:
            reduced = reduced.to(dtypes.pop())
        shards = bucket.shards(reduced, self._mesh.shard_rank)
        inner: dict[str, dict[str, torch.Tensor]] = {}
        for (param, name), shard, is_wanted in zip(reduction.members, shards, wanted, strict=True):
            if not is_wanted:
                continue
            if name is None:
                self._deliver(param, shard.to(self._grad_dtype(param)))
                continue
            parts = inner.setdefault(param.name, {})
            parts[name] = shard.clone()  # subclasses may demand equal storage offsets
            if len(parts) == len(self._recipe(param).names):
                self._deliver(param, self._rebuilt(param, parts))

    def _deliver(self, param: ShardedParam, shard: torch.Tensor) -> None:
        """Make ``shard`` the reduced gradient of ``param``, or add it to the one there."""
        present = param.sharded.grad
        if present is None:
            assign_grad(param.sharded, _torch.from_local(shard, param.grad_spec(shard.dtype)))
        else:
            _torch.local_tensor(present).add_(shard)

    def _grad_dtype(self, param: ShardedParam) -> torch.dtype:
        return self._policy.grad_dtype or param.local.dtype

    # Tensor subclasses ----------------------------------------------------------------------

    def _agree_recipes(
        self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Agree once which gradients are tensor subclasses, made of which inner tensors.

        Collective: one all-gather of a small object for each parameter whose unsharded form is a
        subclass, until some rank had a gradient for it.
        """
        for param, grad in zip(params, grads, strict=True):
            if param.name in self._recipes or param.unsharded is None:
                continue
            if not _torch.is_wrapper_subclass(param.unsharded):
                continue
            heard: list[Any] = [None] * self._mesh.num_shards
            dist.all_gather_object(heard, _recipe_of(grad), group=self._mesh.group)
            known = [said for said in heard if said is not None]
            if known:
                self._recipes[param.name] = known[0] if known[0].names else None

    def _recipe(self, param: ShardedParam) -> SubclassRecipe:
        recipe = self._recipes[param.name]
        assert recipe is not None
        return recipe

    def _rebuilt(self, param: ShardedParam, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        recipe = self._recipe(param)
        like = parts[recipe.names[0]]
        rebuilt = recipe.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            parts, recipe.context, like.shape, like.stride()
        )
        return rebuilt.to(self._grad_dtype(param))


def is_partial(grad: torch.Tensor | None) -> bool:
    """Tell whether a gradient is accumulated on this rank but not reduced over the ranks."""
    return isinstance(grad, DTensor) and grad.placements[-1].is_partial()


def assign_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Set ``param.grad``, also to a dtype that torch would refuse by itself."""
    if param.grad_dtype is not None and param.grad_dtype != grad.dtype:
        param.grad = None
        param.grad_dtype = grad.dtype
    param.grad = grad


def _take_unsharded(param: ShardedParam) -> torch.Tensor | None:
    """Take away what autograd accumulated on the unsharded parameter."""
    if param.unsharded is None:
        return None
    grad = param.unsharded.grad
    if grad is not None:
        param.unsharded.grad = None
    return grad


def _recipe_of(grad: torch.Tensor | None) -> SubclassRecipe | None:
    """Describe a gradient's inner tensors (none for a plain one); ``None`` if there is none."""
    if grad is None:
        return None
    if not _torch.is_wrapper_subclass(grad):
        return SubclassRecipe(torch.Tensor, (), None)
    names, context = grad.__tensor_flatten__()  # type: ignore[attr-defined]
    return SubclassRecipe(type(grad), tuple(names), context)
