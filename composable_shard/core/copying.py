"""Deep copies of sharded modules: shards, groups and settings of their own, the same ranks.

Everything of ours that a module refers to (groups, parameters, hooks) is reached by the copy of its
attributes. So empty objects take the places of groups and parameters first, the modules are copied
around them, and then they are filled in.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.params.extension import copied_shard
from composable_shard.core.params.param import ShardedParam, Slot
from composable_shard.core.params.units import build_units
from composable_shard.core.passes.context import join_tree
from composable_shard.core.passes.hooks import hooks_of
from composable_shard.core.passes.torch_state import list_with_torch

Memo = dict[int, Any]


def copy_sharded(module: nn.Module, memo: Memo) -> nn.Module:
    """Return a deep copy of a sharded module and all below.

    Gradients are not copied, as ``copy.deepcopy`` of a parameter does not either.

    Args:
        module: A sharded module.
        memo: As for ``copy.deepcopy``.

    Collective: none.
    Memory: this rank's shards once more.
    """
    groups = _groups_below(module, memo)
    for group in groups:
        group.reshard()
        memo[id(group)] = object.__new__(ParamGroup)
        for param in group.params:
            memo[id(param)] = object.__new__(ShardedParam)
            memo[id(param.sharded)] = _copied_sharded(param)
    copied = _copied_module(module, memo)
    for group in groups:
        _fill(group, memo)
    for group in reversed(groups):  # as fully_shard is called: the inner ones first
        join_tree(memo[id(group)], group_of)
    return copied


def _groups_below(module: nn.Module, memo: Memo) -> list[ParamGroup]:
    """Return the groups below that are not being copied already, the outer ones first."""
    found = dict.fromkeys(
        group
        for inner in module.modules()
        if (group := group_of(inner)) is not None and id(group) not in memo
    )
    return list(found)


@torch.no_grad()
def _copied_sharded(param: ShardedParam) -> nn.Parameter:
    local = _torch.local_tensor(param.sharded)
    with torch.inference_mode(False):
        own = copied_shard(local)
        spec = _torch.spec_with_dtype(param.spec, own.dtype)
        copied = _torch.parameter_of(_torch.from_local(own, spec), param.sharded.requires_grad)
    if type(own) is torch.Tensor:
        _torch.local_tensor(copied).__dict__.update(local.__dict__)
    for name, value in param.sharded.__dict__.items():
        copied.__dict__.setdefault(name, value)
    if param.sharded.grad_dtype != copied.grad_dtype:
        copied.grad_dtype = param.sharded.grad_dtype
    return copied


def _copied_module(module: nn.Module, memo: Memo) -> nn.Module:
    """Copy the attributes of a module as ``copy.deepcopy`` would, without making one anew."""
    copied = object.__new__(type(module))
    memo[id(module)] = copied
    copied.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    return copied


def _fill(group: ParamGroup, memo: Memo) -> None:
    """Make the object that took the place of a group's copy a group."""
    params = []
    for param in group.params:
        filled: ShardedParam = memo[id(param)]
        filled.__dict__.update(param.__dict__)
        filled.slots = tuple(
            Slot(copy.deepcopy(module, memo), attribute, calls_setattr)
            for module, attribute, calls_setattr in param.slots
        )
        filled.hold(memo[id(param.sharded)])
        filled.forget_unsharded()
        filled.is_unsynced = False
        params.append(filled)
    shards = [_torch.local_tensor(param.sharded) for param in params]
    with torch.inference_mode(False), torch.no_grad():
        units, locals_ = build_units(params, shards)
        for param, local in zip(params, locals_, strict=True):
            param.adopt_local(local)
    copied: ParamGroup = memo[id(group)]
    modules = tuple(copy.deepcopy(module, memo) for module in group.modules)
    copied.__init__(modules, params, units, group.mesh, group.policy)  # type: ignore[misc]
    copied.on_gradient = copy.deepcopy(group.on_gradient, memo)
    for module in modules:
        hooks_of(module).claim_modules()
        list_with_torch(module)
    _copy_settings(group, copied, memo)


def _copy_settings(source: ParamGroup, target: ParamGroup, memo: Memo) -> None:
    """Give a copy the choices of its source; prefetched groups that are not copied drop out."""
    settings, reduction = target.settings, target.settings.reduction
    reduction.__dict__.update(source.settings.reduction.__dict__)
    settings.__dict__.update(source.settings.__dict__)
    settings.reduction = reduction
    for name in ("forward_prefetch", "backward_prefetch"):
        targets: Sequence[ParamGroup] = getattr(source.settings, name)
        setattr(settings, name, [memo[id(group)] for group in targets if id(group) in memo])
    for mesh, channel in source.channels.items():
        target.channels[mesh].__dict__.update(channel.__dict__)
