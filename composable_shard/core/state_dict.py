"""State dicts: saving returns the shards as they are; loading cuts full tensors to shards.

Nothing here communicates, except that loaded DTensors with other placements are redistributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, State
from composable_shard.core.registered import carry_over
from composable_shard.core.storage import ShardedParam, user_grad_dtype
from composable_shard.core.transport import host
from composable_shard.errors import ShardError

Params = dict[str, ShardedParam]
"""The sharded parameters that one module owns, by attribute."""


def install_state_dict_hooks(group: ParamGroup) -> None:
    """Make state dicts of the group's modules contain shards, and accept shards or full tensors.

    User hooks that were registered earlier run after these in a save, and before them in a load. So
    they see the shards that are saved, and the values to load before they are cut.
    """
    places: dict[nn.Module, Params] = {}
    for param in group.params:
        for slot in param.slots:
            places.setdefault(slot.module, {})[slot.name] = param
    for owner, params in places.items():
        for handle in (
            owner.register_state_dict_pre_hook(StateDictHook(_before_save, group, params)),
            owner.register_state_dict_post_hook(StateDictHook(_after_save, group, params)),
        ):
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)
        owner.register_load_state_dict_pre_hook(StateDictHook(_before_load, group, params))
        owner.register_load_state_dict_post_hook(StateDictHook(_after_load, group, params))


def hooks_of_state_dicts(group: ParamGroup) -> list[tuple[StateDictHook, Params]]:
    """Return the hooks that :func:`install_state_dict_hooks` made, each with its parameters."""
    owners = dict.fromkeys(slot.module for param in group.params for slot in param.slots)
    return [
        (hook, hook.params)
        for owner in owners
        for _, hook in _torch.hooks_on(owner)
        if isinstance(hook, StateDictHook) and hook.group is group
    ]


class StateDictHook:
    """Calls one of the functions below for a module and the parameters that its group owns there.

    If a module is copied or pickled without its group (``copy.deepcopy(model.head)`` or
    ``torch.save(model.head, file)``, if only ``model`` is sharded), the copy has shards of its own
    and no group, and its hooks do nothing. If the group is pickled too, loading restores it.

    Attributes:
        group: The group; ``None`` if the hook does nothing.
        params: The parameters of the module that the group owns.
    """

    def __init__(self, act: Callable[..., None], group: ParamGroup | None, params: Params) -> None:
        self._act = act
        self.group = group
        self.params = params

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self.group is not None:
            self._act(self.group, self.params, module, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictHook:
        group = memo.get(id(self.group))
        params = {} if group is None else copy.deepcopy(self.params, memo)
        return StateDictHook(self._act, group, params)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateDictHook, (self._act, None, {})


def _owned(group: ParamGroup, params: Params) -> Params:
    """Return ``params`` without those that another group has taken over; it has its own hooks."""
    own = {id(param) for param in group.params}
    return {attribute: param for attribute, param in params.items() if id(param) in own}


# Saving -------------------------------------------------------------------------------------


def _before_save(group: ParamGroup, params: Params, module: nn.Module, *_: object) -> None:
    """Register the sharded parameters; for this call only during compute or after ``unshard()``."""
    group.check_in_memory("for a state dict")
    if not group.is_unsharded_registered:
        return
    if not group.is_held and not any(_is_computing(one) for one in group.tree.groups):
        group.register_sharded()
        return
    for attribute, param in _owned(group, params).items():
        module._parameters[attribute] = param.sharded


def _after_save(group: ParamGroup, params: Params, module: nn.Module, *_: object) -> None:
    """Register the unsharded parameters again if they were replaced for this call only."""
    if group.is_unsharded_registered:
        for attribute, param in _owned(group, params).items():
            module._parameters[attribute] = param.unsharded


def _is_computing(group: ParamGroup) -> bool:
    """Return whether a forward of the group, or any backward, is running on this thread.

    An interrupted forward leaves its calls on the stack, but then no module call is running.
    """
    if _torch.current_backward() != -1:
        return True
    is_running = any(call.group is group for call in group.tree.call_stack)
    return is_running and _torch.module_call_frame() is not None


# Loading ------------------------------------------------------------------------------------


def _before_load(
    group: ParamGroup,
    params: Params,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *rest: Any,
) -> None:
    """Replace full tensors by this rank's rows of them; torch passes a copy of the user's dict.

    A value of the wrong shape is left unchanged, and torch reports it.
    """
    group.check_in_memory("to load a state dict")
    if group.state is State.UNSHARDED and _is_computing(group):
        raise ShardError(
            f"Expected load_state_dict of {group.label} outside of its forward and backward, got a "
            "call during one; call it before or after them"
        )
    group.reshard()
    host.settle()  # copies of shards that a forward without a backward has launched
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    for attribute, param in _owned(group, params).items():
        param.state_before_load = param.sharded.__dict__, user_grad_dtype(param.sharded)
        key, current = prefix + attribute, module._parameters.get(attribute)
        value = state_dict.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(current, DTensor):
            continue
        if param.shape == () and value.shape == (1,):
            value = value[0]  # as torch does for plain tensors; it cannot for a DTensor
        if value.shape != param.shape:
            continue
        model = param.placement.model
        if not isinstance(value, DTensor):
            state_dict[key] = _shard_of(param, value, current, assign)
        elif value.device_mesh == param.sharded_spec.mesh:
            if value.placements != param.sharded_spec.placements:
                state_dict[key] = value.redistribute(placements=param.sharded_spec.placements)
        elif model is not None and value.device_mesh == model.mesh:
            value = value.redistribute(placements=model.placements)
            state_dict[key] = _shard_of(param, value, current, assign)
        else:
            state_dict[key] = current
            error_messages: list[str] = rest[-1]
            error_messages.append(
                f'Expected a DTensor for "{key}" on {param.sharded_spec.mesh}, got one on '
                f"{value.device_mesh}; pass its full_tensor()."
            )


def _shard_of(param: ShardedParam, full: torch.Tensor, current: DTensor, assign: bool) -> DTensor:
    """Return this rank's rows of a full tensor: a view, or a copy if ``assign``.

    Under tensor parallelism, ``full`` may also be a DTensor that is sharded like the original.
    """
    local = param.shard_of(full)
    if assign:
        device = _torch.local_tensor(current).device
        if local.device.type == "meta":
            device = local.device
        elif device.type == "meta":
            device = param.device
        local = local.to(device, copy=True)
    return _torch.from_local(local, _torch.spec_with_dtype(param.sharded_spec, full.dtype))


def _after_load(group: ParamGroup, params: Params, module: nn.Module, *_: object) -> None:
    """Register an assigned parameter in all places of the one that it replaces; keep attributes."""
    for attribute, param in _owned(group, params).items():
        current = module._parameters.get(attribute)
        if isinstance(current, DTensor) and current.__dict__ is not param.state_before_load[0]:
            carry_over(*param.state_before_load, cast(nn.Parameter, current))
        if len(param.slots) > 1 and isinstance(current, DTensor):
            for slot in param.slots:
                slot.put(current)
