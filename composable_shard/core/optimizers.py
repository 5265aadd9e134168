"""Which parameters optimizers and others have in their hands, and noticing optimizer steps.

A foreach or fused optimizer changes a DTensor without moving any version counter, so that nothing
on the parameter tells that an earlier gather is stale. Every ``torch.optim.Optimizer`` calls a
global hook after its step; the groups of its parameters are told.

An optimizer must have the sharded parameters. One that has others (unsharded ones, originals that
have been replaced, copies of ``unsharded()``) would train nothing; it is refused before its step.

The other way round, the gradients of sharded parameters that ``backward(inputs=...)`` asks for are
looked for where they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard import _torch
from composable_shard.core.gradient import is_partial
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import num_standing_for_sharded
from composable_shard.core.ties import num_replaced, owner_of_sharded, remember_owner
from composable_shard.core.transport import host
from composable_shard.errors import ShardError

_owners: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_num_watched = 0  # calls of watch_optimizer_steps


def watch_optimizer_steps(group: ParamGroup) -> None:
    """Have ``group`` told of every optimizer step on its parameters."""
    global _num_watched
    watch_optimizers()
    _num_watched += 1
    for param in group.params:
        _owners[id(param.sharded)] = group
        remember_owner(param)


@functools.cache
def watch_optimizers() -> None:
    """Have all optimizers checked and corrected from now on; called before anything is gathered."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _accumulate_into_unsharded()
    _torch.let_foreach_zero_any_placement()


def _accumulate_into_unsharded() -> None:
    """Let ``backward(inputs=...)`` take sharded parameters: what they stand for is in the graph.

    Without that it would find none of them there, and give them nothing without a word.
    """
    run = torch.autograd.backward

    @functools.wraps(run)
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs")
        if inputs is None and len(args) > _PLACE_OF_INPUTS:
            *args_before, inputs = args
            args = tuple(args_before)
        if isinstance(inputs, Sequence):
            inputs = [_in_graph(one) for one in inputs]
        elif isinstance(inputs, torch.Tensor):
            inputs = _in_graph(inputs)
        if inputs is not None:
            kwargs["inputs"] = inputs
        run(*args, **kwargs)

    torch.autograd.backward = backward


_PLACE_OF_INPUTS = 5  # among the arguments of backward


def _in_graph(entry: Any) -> Any:
    """Return the unsharded parameter that computes for a sharded one; any other entry itself."""
    param = owner_of_sharded(entry) if isinstance(entry, nn.Parameter) else None
    return entry if param is None or param.unsharded is None else param.unsharded


class _Params:
    """The parameters of an optimizer, and what is looked up for each of them once.

    Attributes:
        ids: Those of all.
        scalars: Sharded ones of no dim.
        strided: Sharded ones whose shards are not contiguous.
        num_watched: How many groups were watched when it was looked up.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._params = params
        self.ids = set(map(id, params))
        sharded = [param for param in params if isinstance(param, DTensor)]
        self.scalars = [param for param in sharded if not _torch.spec_of(param).shape]
        self.strided = [p for p in sharded if not _torch.local_tensor(p).is_contiguous()]
        owners = dict.fromkeys(map(_owners.get, map(id, params)))
        self._groups = [weakref.ref(owner) for owner in owners if owner is not None]
        self.num_watched = _num_watched

    @property
    def groups(self) -> list[ParamGroup]:
        """Their groups, in an order that is the same on all ranks."""
        return [group for ref in self._groups if (group := ref()) is not None]

    def are(self, params: list[torch.Tensor]) -> bool:
        """Tell whether these are the parameters still, and nothing of them is to look up anew."""
        if self.num_watched != _num_watched or len(params) != len(self._params):
            return False
        return all(map(is_, params, self._params))


# On the optimizer, which hooks of its parameters may hold: a table would keep both for ever.
_PARAMS = "_composable_shard_params"


def _params_of(optimizer: Optimizer) -> _Params:
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known = vars(optimizer).get(_PARAMS)
    if known is None or not known.are(params):
        known = vars(optimizer)[_PARAMS] = _Params(params)
    return known


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    params = _params_of(optimizer)
    replaced = num_replaced(params.ids)
    if replaced:
        raise ShardError(
            f"Expected {type(optimizer).__name__} to have sharded parameters, got {replaced} that "
            "fully_shard has replaced; build the optimizer after fully_shard"
        )
    unsharded = num_standing_for_sharded(params.ids)
    if unsharded:
        raise ShardError(
            f"Expected {type(optimizer).__name__} to have sharded parameters, got {unsharded} "
            "unsharded ones, whose changes are lost; build the optimizer, or fill its groups, of "
            "model.parameters() outside of unsharded(), before a forward or after a backward"
        )
    for owner in params.groups:
        owner.check_awake(f"for a step of {type(optimizer).__name__}")
    host.settle()  # copies of shards that a forward without a backward has launched
    if params.strided and any(group.get("fused") for group in optimizer.param_groups):
        _refuse_unreduced(optimizer, params.strided)
    for param in params.scalars:
        _distribute_state(param, optimizer.state.get(param, {}))


def _refuse_unreduced(optimizer: Optimizer, params: list[DTensor]) -> None:
    """Raise if some gradients are not reduced, of parameters with strides of their own.

    DTensor would reduce them to contiguous shards, and fused kernels walk through memory in order,
    so that an element would be stepped by the gradient of another.
    """
    if any(is_partial(param.grad) for param in params):
        raise ShardError(
            f"Expected reduced gradients for a fused step of {type(optimizer).__name__}, got one "
            "that was accumulated without sync, of a parameter that is not contiguous; call "
            "synchronize_gradients() first, or leave out fused=True"
        )


def _distribute_state(param: DTensor, state: dict[str, Any]) -> None:
    """Make DTensors of a scalar parameter's states: torch loads them as if they counted steps."""
    for name, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and value.ndim == 0 and name != "step":
            state[name] = DTensor.from_local(
                value, param.device_mesh, param.placements, run_check=False
            )


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    groups = _params_of(optimizer).groups
    for group in groups:
        group.freshness.note_optimizer_step()
    for context in {group.context for group in groups}:
        context.show_sharded()
