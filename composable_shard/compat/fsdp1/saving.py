"""Hooks by which the state dicts of wrappers hold what was asked for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.compat.fsdp1.state_dict_types import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    converted,
    is_first_rank,
    is_rank0_only,
    local_like,
    rename_keys,
)

if TYPE_CHECKING:
    from composable_shard.compat.fsdp1.module import FullyShardedDataParallel

_INNER = "_fsdp_wrapped_module."

_errors: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""What a loading wrapper is told by those below."""


def install(wrapper: FullyShardedDataParallel) -> None:
    """Have the state dicts of a wrapper go through here."""
    wrapper.register_state_dict_post_hook(_after_save)
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set what the state dicts of all wrappers in a module hold.

    Args:
        module: A wrapper, or a module with wrappers below.
        state_dict_type: Full tensors, DTensors or this rank's shards.
        state_dict_config: Where they are.
        optim_state_dict_config: The same for the optimizer's state dict.

    Returns:
        What was set before.

    Raises:
        TypeError: If a config is not that of the type.
        ValueError: If there are no wrappers, or they disagree on what was set before.

    Collective: none.

    Example:
        >>> from composable_shard.compat.fsdp1 import FullyShardedDataParallel
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = FullyShardedDataParallel(nn.Linear(4, 4, bias=False), device_id="cpu")
        ...     before = set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        ...     before.state_dict_type.name, model.state_dict()["weight"].shape
        ('FULL_STATE_DICT', torch.Size([2, 4]))
    """
    new = StateDictSettings.of(state_dict_type, state_dict_config, optim_state_dict_config)
    before = get_state_dict_type(module)
    for wrapper in _wrappers(module):
        wrapper.fsdp_state_dict_settings = new
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return what the state dicts of all wrappers in a module hold.

    Raises:
        ValueError: If there are no wrappers, or they disagree.

    Collective: none.

    Example:
        >>> from composable_shard.compat.fsdp1 import FullyShardedDataParallel
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = FullyShardedDataParallel(nn.Linear(4, 4), device_id="cpu")
        ...     get_state_dict_type(model).state_dict_config
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    """
    found = list(dict.fromkeys(wrapper.fsdp_state_dict_settings for wrapper in _wrappers(module)))
    if len(found) != 1:
        got = f"{len(found)} kinds: {found}" if found else "no wrapper"
        raise ValueError(
            f"Expected one kind of state dicts in all wrappers of {type(module).__name__}, got "
            f"{got}; call set_state_dict_type on a module with wrappers, and on all of it"
        )
    return found[0]


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set what the state dicts of all wrappers in a module hold, within this context.

    Args:
        module: A wrapper, or a module with wrappers below.
        state_dict_type: Full tensors, DTensors or this rank's shards.
        state_dict_config: Where they are.
        optim_state_dict_config: The same for the optimizer's state dict.

    Raises:
        TypeError: If a config is not that of the type.
        ValueError: If there are no wrappers, or they disagree on what was set before.

    Collective: none.

    Example:
        >>> from composable_shard.compat.fsdp1 import FullyShardedDataParallel
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = FullyShardedDataParallel(nn.Linear(4, 4), device_id="cpu")
        ...     with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        ...         type(model.state_dict()["weight"]).__name__
        'DTensor'
    """
    before = set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        for wrapper in _wrappers(module):
            wrapper.fsdp_state_dict_settings = before


def _wrappers(module: nn.Module) -> list[FullyShardedDataParallel]:
    from composable_shard.compat.fsdp1.module import FullyShardedDataParallel

    return FullyShardedDataParallel.fsdp_modules(module)


# Hooks ------------------------------------------------------------------------------------------


def _after_save(
    wrapper: FullyShardedDataParallel, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Convert what is in the wrapper, under the names of the plain model.

    Those below have done so before: what they have converted is no DTensor any more.
    """
    rename_keys(state_dict, prefix + _INNER, prefix)
    about = _torch.state_dict_metadata(state_dict)
    for name in [name for name in about if f"{name}.".startswith(prefix + _INNER)]:
        clean = prefix + f"{name}.".removeprefix(prefix + _INNER)
        about[clean[:-1]] = about.pop(name)
    settings = wrapper.fsdp_state_dict_settings
    kind, config = settings.state_dict_type, settings.state_dict_config
    params = {prefix + n: id(p) for n, p in wrapper.named_parameters(remove_duplicate=False)}
    done: dict[int, torch.Tensor] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict[key]
        if not isinstance(value, torch.Tensor):
            continue
        param = params.get(key)
        if param not in done or param is None:
            value = converted(value, kind, config)
        state_dict[key] = value if param is None else done.setdefault(param, value)
    if is_rank0_only(config) and not is_first_rank(wrapper):
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]


def _before_load(
    wrapper: FullyShardedDataParallel, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Turn local shards into DTensors; give the keys the names that modules ask for."""
    inner = prefix + _INNER
    _errors[wrapper] = rest[-1]
    rename_keys(state_dict, inner, prefix)
    if wrapper.fsdp_state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        for name, param in wrapper.named_parameters(remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if isinstance(param, DTensor):
                state_dict[prefix + name] = local_like(param, value)
    rename_keys(state_dict, prefix, inner)


def _after_load(wrapper: FullyShardedDataParallel, incompatible: Any) -> None:
    """Tell what does not fit by the names of the plain model."""
    for texts in (*incompatible, _errors.pop(wrapper, [])):
        texts[:] = [text.replace(_INNER, "") for text in texts]
