"""State dicts: saving returns the shards unchanged; loading cuts full tensors to shards.

Nothing here communicates, except that loaded DTensors with other placements are redistributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, State
from composable_shard.core.storage import ShardedParam
from composable_shard.core.transport import host
from composable_shard.core.user_changes import carry_over
from composable_shard.errors import ShardError

# The attribute of a module that records its sharded parameters.
_PARAMS = "_composable_shard_params"


class _Params(dict[str, ShardedParam]):
    """The sharded parameters of a module, by name; a copy or a pickle is empty.

    If a module is copied without its group (``copy.deepcopy(model.head)``, if only ``model`` is
    sharded), the copy has shards of its own and no group, so the hooks below do nothing.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _Params, ()


def record_params(group: ParamGroup) -> list[nn.Module]:
    """Record the parameters of a group on their modules; return modules that had no record yet."""
    slots = [(slot, param) for param in group.params for slot in param.slots]
    modules = dict.fromkeys(slot.module for slot, _ in slots)
    new = [module for module in modules if _PARAMS not in module.__dict__]
    for slot, param in slots:
        slot.module.__dict__.setdefault(_PARAMS, _Params())[slot.name] = param
    return new


def install_state_dict_hooks(group: ParamGroup) -> None:
    """Make state dicts of the group's modules contain shards, and accept shards or full tensors.

    In a save, all hooks of users run after these hooks, and see shards. In a load, hooks that were
    registered earlier run before these hooks, and see full values.
    """
    for module in record_params(group):
        for handle in (
            module.register_state_dict_pre_hook(_before_save),
            module.register_state_dict_post_hook(_after_save),
        ):
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_load_state_dict_post_hook(_after_load)


def _params_of(module: nn.Module) -> list[tuple[str, ShardedParam]]:
    return list(module.__dict__.get(_PARAMS, {}).items())


# Saving -------------------------------------------------------------------------------------


def _before_save(module: nn.Module, *_: object) -> None:
    """Register the sharded parameters.

    They stay only for this save if a group of the tree computes, or after ``unshard()``.
    """
    for name, param in _params_of(module):
        group: ParamGroup = param.group
        group.check_in_memory("for a state dict")
        if not group.is_unsharded_registered:
            continue
        # If any group computes, this group may be needed unsharded again.
        if group.is_kept_by_user or any(map(_is_computing, group.tree.groups)):
            module._parameters[name] = param.sharded
        else:
            group.register_sharded()


def _after_save(module: nn.Module, *_: object) -> None:
    """Register the unsharded parameters again if they were replaced only for the save."""
    for name, param in _params_of(module):
        if param.group.is_unsharded_registered:
            module._parameters[name] = param.unsharded


def _is_computing(group: ParamGroup) -> bool:
    """Return whether a forward of the group, or any backward, is running on this thread.

    An interrupted forward leaves calls on ``call_stack``, but no running module call.
    """
    if _torch.current_backward() != -1:
        return True
    is_running = any(call.group is group for call in group.tree.call_stack)
    return is_running and _torch.module_call_frame() is not None


# Loading ------------------------------------------------------------------------------------


def _before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *rest: Any,
) -> None:
    """Replace full tensors by this rank's rows, in torch's copy of the user's dict.

    A value of the wrong shape is left unchanged, and torch reports it.
    """
    params = _params_of(module)
    for group in dict.fromkeys(param.group for _, param in params):
        group.check_in_memory("to load a state dict")
        if group.state is State.UNSHARDED and _is_computing(group):
            raise ShardError(
                f"Expected load_state_dict of {group.label} outside of its forward and backward, "
                "got a call during one; call it before or after them"
            )
        group.reshard()
    host.synchronize()  # copies of shards to the device may be in flight
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    for attribute, param in params:
        param.record_user_state()
        key, current = prefix + attribute, module._parameters.get(attribute)
        value = state_dict.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(current, DTensor):
            continue
        if value.shape != param.shape:
            continue
        spec = param.placement.unsharded_spec
        if not isinstance(value, DTensor):
            state_dict[key] = _shard_of(param, value, current, assign)
        elif value.device_mesh == param.placement.mesh:
            if value.placements != param.placement.sharded:
                state_dict[key] = value.redistribute(placements=param.placement.sharded)
        elif spec is not None and value.device_mesh == spec.mesh:
            value = value.redistribute(placements=spec.placements)
            state_dict[key] = _shard_of(param, value, current, assign)
        else:
            state_dict[key] = current
            error_messages: list[str] = rest[-1]
            error_messages.append(
                f'Expected a DTensor for "{key}" on {param.placement.mesh}, got one on '
                f"{value.device_mesh}; pass its full_tensor()."
            )


def _shard_of(param: ShardedParam, full: torch.Tensor, current: DTensor, assign: bool) -> DTensor:
    """Return this rank's rows of a full tensor: a view, or a copy if ``assign``.

    Under tensor parallelism, ``full`` may also be a DTensor, sharded like the parameter before
    ``fully_shard``.
    """
    local = param.shard_of(full)
    if assign:
        device = _torch.local_tensor(current).device
        if local.device.type == "meta":
            device = local.device
        elif device.type == "meta":
            device = param.device
        local = local.to(device, copy=True)
    return _torch.from_local(local, param.spec("sharded", full.dtype))


def _after_load(module: nn.Module, *_: object) -> None:
    """Register an assigned parameter in all slots, with the attributes of the one it replaces."""
    for attribute, param in _params_of(module):
        current = module._parameters.get(attribute)
        if not isinstance(current, DTensor):
            continue
        carry_over(param, current)
        if len(param.slots) > 1:
            param.put(current)
