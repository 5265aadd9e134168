"""What stands in ``.grad`` of a sharded parameter.

A gradient's placements are its state: ``None``; averaged over no axis yet (accumulated without
sync); averaged over the shards but not the replicas; or reduced, with the parameter's placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.params.param import LIFTED, ShardedParam

_grad_of = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
_grad_dtype_of = attrgetter("grad_dtype")
_is_something = partial(is_not, None)


def is_partial(grad: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Tell whether a gradient still has to be averaged over some ranks."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


def unreduced(param: ShardedParam) -> torch.Tensor | None:
    """Return the local sum of a gradient that is not reduced at all, if that is what there is."""
    grad = param.sharded.grad
    if not is_partial(grad) or _is_unreplicated(param, grad):
        return None
    return _torch.local_tensor(grad)


def unreplicated(param: ShardedParam) -> torch.Tensor | None:
    """Return the local shard of a gradient that is not yet averaged over the replicas."""
    grad = param.sharded.grad
    if not is_partial(grad) or not _is_unreplicated(param, grad):
        return None
    return _torch.local_tensor(grad)


def reduced(param: ShardedParam) -> torch.Tensor | None:
    """Return the local shard of a gradient that is reduced."""
    grad = param.sharded.grad
    return None if grad is None or is_partial(grad) else _torch.local_tensor(grad)


def set_unreduced(param: ShardedParam, total: torch.Tensor) -> None:
    """Let ``total``, this rank's sum of the shape of the parameter, be the gradient."""
    spec = param.spec_of_grad("unreduced", total.dtype)
    assign(param, _torch.from_local(total.to(param.device), spec))


def set_unreplicated(param: ShardedParam, shard: torch.Tensor) -> None:
    """Let ``shard``, averaged over the ranks that share the parameter, be the gradient."""
    spec = param.spec_of_grad("unreplicated", shard.dtype)
    assign(param, _torch.from_local(shard.to(param.device), spec))


def hold_for_replicas(param: ShardedParam) -> None:
    """Turn a reduced gradient into one to be averaged over the replicas: they all have the same."""
    shard = reduced(param)
    if shard is not None:
        set_unreplicated(param, shard)


def to_reduce(params: Sequence[ShardedParam]) -> list[ShardedParam]:
    """Return the parameters that a reduction takes in now, which all ranks tell alike.

    They are those that are trained, and frozen ones of which any rank may have accumulated some.
    """
    return [param for param in params if param.is_unsynced or param.sharded.requires_grad]


def to_reduce_and_held(
    params: Sequence[ShardedParam],
) -> tuple[list[ShardedParam], list[torch.dtype | None]]:
    """Return the parameters that a reduction takes in, and the dtypes of what waits for it.

    A dtype is ``None`` where nothing waits.
    """
    leaves = [param.sharded for param in params]
    with _torch.without_overrides():
        is_trained = list(map(_requires_grad, leaves))
        grads = list(map(_grad_of, leaves))
        if all(is_trained) and not any(map(_is_something, grads)):
            return list(params), [None] * len(params)
        held = [g.dtype if g is not None and is_partial(g) else None for g in grads]
    takes_in = [one or param.is_unsynced for one, param in zip(is_trained, params, strict=True)]
    return list(compress(params, takes_in)), list(compress(held, takes_in))


def has_hooks(param: ShardedParam) -> bool:
    """Tell whether the user put hooks on the sharded parameter."""
    return _torch.has_grad_hooks(param.sharded)


def deliver(param: ShardedParam, shard: torch.Tensor) -> None:
    """Make ``shard`` the reduced gradient, or add it to the one there; call the user's hooks.

    Args:
        param: The parameter.
        shard: On its device, in the dtype that was asked of its gradients.
    """
    sharded = param.sharded
    grad: torch.Tensor = _torch.from_local(shard, param.spec_of_grad("sharded", shard.dtype))
    if not _torch.has_grad_hooks(sharded):
        _add(sharded, grad)
        return
    with torch.no_grad():
        grad = _torch.call_grad_hooks(sharded, grad)
        _add(sharded, grad)
        _torch.call_post_accumulate_grad_hooks(sharded)


def deliver_all(
    params: Sequence[ShardedParam],
    shards: Sequence[torch.Tensor],
    specs: Sequence[_torch.DTensorSpec],
) -> None:
    """Deliver several; in half the time where there are neither hooks nor gradients yet.

    Args:
        params: The parameters.
        shards: See :func:`deliver`.
        specs: What describes each as a reduced gradient.
    """
    leaves = [param.sharded for param in params]
    with _torch.without_overrides():
        if _are_bare(leaves, [shard.dtype for shard in shards]):
            for leaf, shard, spec in zip(leaves, shards, specs, strict=True):
                leaf.grad = _torch.from_local(shard, spec)
            return
    for param, shard in zip(params, shards, strict=True):
        deliver(param, shard)


def _are_bare(leaves: Sequence[torch.Tensor], dtypes: list[torch.dtype]) -> bool:
    """Tell whether leaves have neither gradients nor hooks, and take gradients of ``dtypes``."""
    return (
        not any(map(_is_something, map(_grad_of, leaves)))
        and not any(map(_torch.has_grad_hooks, leaves))
        and list(map(_grad_dtype_of, leaves)) == dtypes
    )


def _add(param: nn.Parameter, grad: torch.Tensor) -> None:
    present = param.grad
    if present is None:
        assign_grad(param, grad)
    else:
        with torch.no_grad():
            _torch.local_tensor(present).add_(_torch.local_tensor(grad))


def assign(param: ShardedParam, grad: torch.Tensor) -> None:
    """Set the gradient, of whatever dtype; remember which dtype the user asked for."""
    param.remember_grad_dtype()
    assign_grad(param.sharded, grad)


def assign_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Set ``param.grad``, also to a dtype that torch would refuse by itself."""
    asked = param.grad_dtype
    if asked is not None and asked != grad.dtype:
        param.grad = None
        param.grad_dtype = None
        param.__dict__[LIFTED] = True
    param.grad = grad


def _is_unreplicated(param: ShardedParam, grad: DTensor) -> bool:
    placement = param.placement
    if placement.unreplicated == placement.unreduced:  # no axis shards
        return False
    return grad.placements == placement.unreplicated
