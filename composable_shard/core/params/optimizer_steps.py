"""Noticing optimizer steps.

A foreach or fused optimizer changes a DTensor without moving any version counter, so that nothing
on the parameter tells that an earlier gather is stale. Every ``torch.optim.Optimizer`` calls a
global hook after its step; the groups of its parameters are told. An optimizer that was built of
parameters which have been replaced since would train nothing; it is refused before its step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard.core.params.left_plain import warn_of_unsharded
from composable_shard.core.params.ties import is_replaced
from composable_shard.errors import ShardError

if TYPE_CHECKING:
    from composable_shard.core.group import ParamGroup

_owners: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_installed: list[Any] = []


def watch_optimizer_steps(group: ParamGroup) -> None:
    """Have ``group`` told of every optimizer step on its parameters."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
        _installed.append(register_optimizer_step_post_hook(_after_step))
    for param in group.params:
        _owners[id(param.sharded)] = group


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    replaced = sum(
        is_replaced(param) for group in optimizer.param_groups for param in group["params"]
    )
    if replaced:
        raise ShardError(
            f"Expected {type(optimizer).__name__} to have sharded parameters, got {replaced} that "
            "fully_shard has replaced; build the optimizer after fully_shard"
        )

    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor) and param.ndim == 0:
                _distribute_state(param, optimizer.state.get(param, {}))
    warn_of_unsharded(optimizer, _owners.values())


def _distribute_state(param: DTensor, state: dict[str, Any]) -> None:
    """Make DTensors of a scalar parameter's states: torch loads them as if they counted steps."""
    for name, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and value.ndim == 0 and name != "step":
            state[name] = DTensor.from_local(
                value, param.device_mesh, param.placements, run_check=False
            )


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = {
        owner
        for param_group in optimizer.param_groups
        for param in param_group["params"]
        if isinstance(param, DTensor) and (owner := _owners.get(id(param))) is not None
    }
    for group in stepped:
        group.freshness.note_optimizer_step()
