"""Hooks of optimizer steps: checks of the parameters, and a step count for each group.

Foreach and fused kernels change a DTensor without bumping its version counter, so each group counts
the steps that may have changed its shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.reduction import is_partial
from composable_shard.core.storage import num_full_tensors, owner_of_sharded
from composable_shard.core.transport import host
from composable_shard.errors import ShardError


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _groups_of(params: Iterable[torch.Tensor]) -> list[ParamGroup]:
    """Return the groups of parameters, in the same order on all ranks."""
    owners = map(owner_of_sharded, params)
    return list(dict.fromkeys(owner.group for owner in owners if owner is not None))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    params, kind = _params_of(optimizer), type(optimizer).__name__
    num_full = num_full_tensors(params)
    if num_full:
        raise ShardError(
            f"Expected {kind} to have sharded parameters, got {num_full} full ones; build it "
            "after fully_shard, outside unsharded(), not between a forward and its backward"
        )
    groups = _groups_of(params)
    for group in groups:
        group.check_in_memory(f"for a step of {kind}")
    reduce_before_step(params)
    has_visits = any(group.tree.tape.visits for group in groups)
    if has_visits and all(param.grad is None for param in params):
        warnings.warn(
            f"Expected gradients for a step of {kind}, because a forward has run, got none; call "
            "loss.backward(), without inputs=, which gives sharded parameters no gradients",
            stacklevel=2,
        )
    host.synchronize()  # copies of shards may be in flight after a forward without a backward
    is_fused = any(param_group.get("fused") for param_group in optimizer.param_groups)
    # DTensor reduces an unreduced gradient to a contiguous tensor, even if the shard is not
    # contiguous. Fused kernels pair shard and gradient in memory order: they would mix up elements.
    if is_fused and any(
        is_partial(p.grad) and not _torch.local_tensor(p).is_contiguous() for p in params
    ):
        raise ShardError(
            f"Expected reduced gradients for a fused step of {kind}, got an unreduced one of a "
            "parameter that is not contiguous; call synchronize_gradients(), or drop fused=True"
        )
    for param in params:
        if isinstance(param, DTensor) and param.ndim == 0:
            _distribute_state(param, optimizer.state.get(param, {}))


def _distribute_state(param: DTensor, state: dict[str, Any]) -> None:
    """Wrap plain states of a scalar parameter, except ``step``, in DTensors.

    Loading a full state dict leaves them plain.
    """
    for name, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and value.ndim == 0 and name != "step":
            state[name] = _torch.local_like(param, value)


def reduce_before_step(params: Iterable[torch.Tensor]) -> None:
    """Reduce all unsynced gradients of each idle tree that has a group with ``reduces_each_step``.

    Collective: the reductions.
    """
    groups = [group for group in _groups_of(params) if group.settings.reduces_each_step]
    for tree in dict.fromkeys(group.tree for group in groups if not group.tree.is_computing):
        tree.synchronize_gradients()


def free_after_step(params: Iterable[torch.Tensor]) -> None:
    """Count an optimizer step for the groups of ``params``.

    Groups that gather once a step are freed; the others register their sharded parameters.
    """
    for group in _groups_of(params):
        group.num_optimizer_steps += 1
        if group.tree.is_computing:
            continue
        if group.settings.gathers_once_a_step and not group.is_kept_by_user:
            group.reshard()
        elif group.is_unsharded_registered:
            group.register_sharded()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(lambda optimizer, *_: free_after_step(_params_of(optimizer)))
