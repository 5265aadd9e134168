"""Hooks of optimizer steps: checks of the parameters, and a step count for each group.

Imports reduction, storage, ties. Foreach and fused kernels change a DTensor without bumping its
version counter, so each group counts the steps that may have changed its shards.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
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
from composable_shard.core.storage import (
    num_full_tensors,
    num_sharded_changes,
    owner_of_sharded,
)
from composable_shard.core.ties import num_replaced
from composable_shard.core.transport import host
from composable_shard.errors import ShardError


class _Params:
    """The parameters of an optimizer, with their groups and kinds, looked up once.

    Attributes:
        ids: The ids of all parameters.
        scalars: The sharded parameters without dims.
        noncontiguous: The sharded parameters with shards that are not contiguous.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params, self._num_sharded_changes = params, num_sharded_changes()
        self.ids = set(map(id, params))
        sharded = [param for param in params if isinstance(param, DTensor)]
        self.scalars = [param for param in sharded if not _torch.spec_of(param).shape]
        self.noncontiguous = [p for p in sharded if not _torch.local_tensor(p).is_contiguous()]
        ours = [param for param in map(owner_of_sharded, params) if param is not None]
        self._groups = list(map(weakref.ref, dict.fromkeys(param.group for param in ours)))

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of the parameters, in the same order on all ranks."""
        return [group for ref in self._groups if (group := ref()) is not None]

    def have_grads(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(param.grad is not None for param in self._params)

    def is_of(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether ``params`` are these parameters, with the same groups and kinds."""
        if self._num_sharded_changes != num_sharded_changes() or len(params) != len(self._params):
            return False
        return all(map(is_, params, self._params))


_PARAMS = "_composable_shard_params"  # the attribute of an optimizer with its `_Params`


def _params_of(optimizer: Optimizer) -> _Params:
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known = vars(optimizer).get(_PARAMS)
    if known is None or not known.is_of(params):
        known = vars(optimizer)[_PARAMS] = _Params(params)
    return known


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    params, kind = _params_of(optimizer), type(optimizer).__name__
    replaced = num_replaced(params.ids)
    if replaced:
        raise ShardError(
            f"Expected {kind} to have sharded parameters, got {replaced} that fully_shard has "
            "replaced; build the optimizer after fully_shard"
        )
    unsharded = num_full_tensors(params.ids)
    if unsharded:
        raise ShardError(
            f"Expected {kind} to have sharded parameters, got {unsharded} unsharded ones, and "
            "their updates would be lost; build the optimizer, or its param_groups, from "
            "model.parameters() outside of unsharded(), before a forward or after a backward"
        )
    groups = params.groups
    for group in groups:
        group.check_in_memory(f"for a step of {kind}")
    if any(group.tree.tape.visits for group in groups) and not params.have_grads():
        warnings.warn(
            f"Expected gradients after a forward for a step of {kind}, got none; "
            "backward(inputs=...) gives none to sharded parameters: call loss.backward()",
            stacklevel=2,
        )
    host.synchronize()  # wait for copies of shards that a forward without a backward has launched
    if any(param_group.get("fused") for param_group in optimizer.param_groups):
        _refuse_unreduced(kind, params.noncontiguous)
    for param in params.scalars:
        _distribute_state(param, optimizer.state.get(param, {}))


def _refuse_unreduced(kind: str, params: Sequence[DTensor]) -> None:
    """Raise if any gradient of parameters that are not contiguous is not reduced.

    DTensor would reduce it to a contiguous shard. Fused kernels traverse memory in order, so they
    would update an element by the gradient of another element.
    """
    if any(is_partial(param.grad) for param in params):
        raise ShardError(
            f"Expected reduced gradients for a fused step of {kind}, got a gradient that was "
            "accumulated without sync, of a parameter that is not contiguous; call "
            "synchronize_gradients() first, or leave out fused=True"
        )


def _distribute_state(param: DTensor, state: dict[str, Any]) -> None:
    """Wrap the states of a scalar parameter in DTensors, because torch loads plain tensors."""
    for name, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and value.ndim == 0 and name != "step":
            state[name] = DTensor.from_local(
                value, param.device_mesh, param.placements, run_check=False
            )


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for group in _params_of(optimizer).groups:
        group.num_optimizer_steps += 1
        if group.is_unsharded_registered and not group.tree.is_computing:
            group.register_sharded()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
