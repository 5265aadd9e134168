"""State dicts: sharded parameters go out as they are; full ones that come in are cut to shards."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam


def install_state_dict_hooks(group: ParamGroup) -> None:
    """Have state dicts of the group's modules hold shards, and take shards or full tensors."""
    places: dict[nn.Module, dict[str, ShardedParam]] = {}
    for param in group.params:
        for slot in param.slots:
            places.setdefault(slot.module, {})[slot.attribute] = param
    for owner, params in places.items():
        owner.register_state_dict_pre_hook(lambda *_: group.reshard())
        owner.register_state_dict_post_hook(partial(_after_save, params))
        owner.register_load_state_dict_pre_hook(partial(_before_load, group, params))


def _after_save(
    params: dict[str, ShardedParam],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_: object,
) -> None:
    """Make detached parameters look as if their local tensor began its storage.

    A DTensor reports its local tensor's storage offset as its own, and what saves tensors takes
    one with an offset for a tensor with data of its own.
    """
    for attribute, param in params.items():
        value = state_dict.get(prefix + attribute)
        if isinstance(value, DTensor) and value is not param.sharded:
            state_dict[prefix + attribute] = _torch.from_local_at_start(value)


def _before_load(
    group: ParamGroup,
    params: dict[str, ShardedParam],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_: object,
) -> None:
    """Replace full tensors by this rank's rows of them; the dict is the loader's own copy."""
    group.reshard()
    for attribute, param in params.items():
        value = state_dict.get(prefix + attribute)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if tuple(value.shape) != param.layout.shape:
            continue  # torch says what is wrong with it
        current = module._parameters[attribute]
        assert current is not None
        if not isinstance(current, DTensor):
            continue  # it is full itself, inside of unsharded()
        local = param.shard_of(value).to(_torch.local_tensor(current).device).clone()
        state_dict[prefix + attribute] = _torch.from_local(
            local, _torch.spec_with_dtype(param.spec, value.dtype)
        )
