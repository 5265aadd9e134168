"""State dicts of wrapped models and their optimizers: full, sharded or local."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.compat.fsdp1 import options
from composable_shard.compat.fsdp1.options import StateDictType, is_rank0_only, settings_of
from composable_shard.train.weights.gathering import full_copies

# State dicts of a wrapped model: full, sharded or local, under the names of the plain model -------


def is_first_rank(module: nn.Module) -> bool:
    """Return whether this rank is the first in the mesh of a module's parameters."""
    for param in module.parameters():
        if isinstance(param, DTensor):
            return not any(param.device_mesh.get_coordinate() or ())
    return not dist.is_initialized() or dist.get_rank() == 0


# Tensors ----------------------------------------------------------------------------------------


def converted(
    values: Mapping[Any, torch.Tensor],
    kind: StateDictType,
    config: options.StateDictConfig | options.OptimStateDictConfig,
) -> dict[Any, torch.Tensor | None]:
    """Convert sharded tensors, by any keys, to the form of a type of state dicts.

    With ``rank0_only``, full tensors are ``None`` on the other ranks.

    Collective: for full tensors their gathers.
    """
    device = torch.device("cpu") if config.offload_to_cpu else None
    sharded = {key: value for key, value in values.items() if isinstance(value, DTensor)}
    found: dict[Any, torch.Tensor | None] = dict(values)
    if kind is StateDictType.FULL_STATE_DICT:
        names, first_only = ["a value of the state dict"] * len(sharded), is_rank0_only(config)
        fulls = full_copies(list(sharded.values()), names, first_only=first_only, device=device)
        found.update(zip(sharded, fulls, strict=True))
    elif kind is StateDictType.LOCAL_STATE_DICT:
        found |= {key: _torch.local_tensor(value).detach() for key, value in sharded.items()}
    if device is None:
        return found
    return {key: value if value is None else value.to(device) for key, value in found.items()}


def sharded_like(param: DTensor, value: torch.Tensor) -> DTensor:
    """Return a tensor, full or sharded in any way, with the placements of a parameter.

    Collective: none for a full tensor.
    """
    mesh, local = param.device_mesh, _torch.local_tensor(param)
    if isinstance(value, DTensor) and value.device_mesh == mesh:
        return value.redistribute(placements=param.placements)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    cut = _torch.cut(value, mesh, param.placements)
    return _torch.local_like(param, cut.to(local.device, copy=True))


def shard_of(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a local shard of a parameter as a DTensor; return other shapes unchanged."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value
    is_shard = value.shape == _torch.local_tensor(param).shape
    return _torch.local_like(param, value) if is_shard else value


# The type of the state dicts of wrappers ----------------------------------------------------------

_INNER = "_fsdp_wrapped_module."

_errors: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""The errors of the modules below a wrapper that is loading."""


class Wrapper(nn.Module):
    """The base of wrappers, with the hooks of state dicts.

    Attributes:
        fsdp_state_dict_settings: The type of its state dicts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fsdp_state_dict_settings = settings_of(StateDictType.FULL_STATE_DICT)
        self.register_state_dict_post_hook(_after_save)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: options.StateDictConfig | None = None,
    optim_state_dict_config: options.OptimStateDictConfig | None = None,
) -> options.StateDictSettings:
    """Set the type of the state dicts of all wrappers in a module.

    Args:
        module: A wrapper, or a module with wrappers below.
        state_dict_type: Full tensors, DTensors or this rank's shards.
        state_dict_config: Where the tensors are.
        optim_state_dict_config: The same for the optimizer's state dict.

    Returns:
        The previous settings.

    Raises:
        TypeError: If a config does not belong to the type.
        ValueError: If there are no wrappers, or their previous settings differ.

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
    new = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
    before = get_state_dict_type(module)
    for wrapper in _wrappers(module):
        wrapper.fsdp_state_dict_settings = new
    return before


def get_state_dict_type(module: nn.Module) -> options.StateDictSettings:
    """Return the type of the state dicts of all wrappers in a module.

    Raises:
        ValueError: If there are no wrappers, or their settings differ.

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
    state_dict_config: options.StateDictConfig | None = None,
    optim_state_dict_config: options.OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the type of the state dicts of all wrappers in a module, within this context.

    Args:
        module: A wrapper, or a module with wrappers below.
        state_dict_type: Full tensors, DTensors or this rank's shards.
        state_dict_config: Where the tensors are.
        optim_state_dict_config: The same for the optimizer's state dict.

    Raises:
        TypeError: If a config does not belong to the type.
        ValueError: If there are no wrappers, or their previous settings differ.

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
    old = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for wrapper in _wrappers(module):
            wrapper.fsdp_state_dict_settings = old


def _wrappers(module: nn.Module) -> list[Wrapper]:
    return [inner for inner in module.modules() if isinstance(inner, Wrapper)]


# Hooks ------------------------------------------------------------------------------------------


def _after_save(wrapper: Wrapper, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Convert the tensors of the wrapper, under the names of the plain model.

    Inner wrappers have already converted their tensors, which are no longer DTensors.
    """
    _rename_keys(state_dict, prefix + _INNER, prefix)
    about = _torch.state_dict_metadata(state_dict)
    for name in list(about):  # names of modules have no dot at the end
        about[f"{name}.".replace(_INNER, "")[:-1]] = about.pop(name)
    settings = wrapper.fsdp_state_dict_settings
    kind, config = settings.state_dict_type, settings.state_dict_config
    # A tied parameter is one tensor under several names.
    params = {prefix + n: id(p) for n, p in wrapper.named_parameters(remove_duplicate=False)}
    keys = [key for key in state_dict if key.startswith(prefix)]
    tensors = {key: state_dict[key] for key in keys if isinstance(state_dict[key], torch.Tensor)}
    distinct = {params.get(key, key): value for key, value in tensors.items()}
    found = converted(distinct, kind, config)
    state_dict.update((key, found[params.get(key, key)]) for key in tensors)
    if is_rank0_only(config) and not is_first_rank(wrapper):
        for key in keys:
            del state_dict[key]


def _before_load(wrapper: Wrapper, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Turn local shards into DTensors, and the names of the plain model into those of modules."""
    inner = prefix + _INNER
    _errors[wrapper] = rest[-1]
    _rename_keys(state_dict, inner, prefix)
    if wrapper.fsdp_state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        for name, param in wrapper.named_parameters(remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor):
                state_dict[prefix + name] = shard_of(param, value)
    _rename_keys(state_dict, prefix, inner)


def _rename_keys(states: dict[str, Any], old: str, new: str) -> None:
    """Replace a prefix of keys, in place; the order of the keys stays."""
    for key in [key for key in states if key.startswith(old)]:
        states[new + key.removeprefix(old)] = states.pop(key)


def _after_load(wrapper: Wrapper, incompatible: Any) -> None:
    """Report errors with the names of the plain model."""
    for texts in (*incompatible, _errors.pop(wrapper, [])):
        texts[:] = [text.replace(_INNER, "") for text in texts]


# State dicts of optimizers: by the names of parameters, full, sharded or local --------------------


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer by the names of parameters.

    Args:
        model: The module with its parameters: a wrapper, or a module with wrappers below.
        optim: The optimizer.
        optim_state_dict: Its state dict, if already taken, by indices or by names.
        group: Accepted without effect; the mesh of each parameter decides.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`` with tensors in
        the form of the state dict type; with ``rank0_only``, empty on all ranks but the first.

    Raises:
        ValueError: If the optimizer has a parameter that is not in ``model``.

    Collective: for full tensors, a gather for each bucket of 64 MiB of them.

    Example:
        >>> from composable_shard.compat.fsdp1 import FullyShardedDataParallel
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = FullyShardedDataParallel(nn.Linear(4, 4), device_id="cpu")
        ...     optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     optimizer.step()
        ...     states = optim_state_dict(model, optimizer)["state"]
        ...     {name: state["momentum_buffer"].shape for name, state in states.items()}
        {'weight': torch.Size([4, 4]), 'bias': torch.Size([4])}
    """
    settings = get_state_dict_type(model)
    kind, config = settings.state_dict_type, settings.optim_state_dict_config
    states = optim.state_dict() if optim_state_dict is None else optim_state_dict
    names = list(_named_params(model, optim))
    saved = states["state"]  # by name if it was converted
    known = {name: saved.get(n, saved.get(name)) for n, name in enumerate(names)}
    known = {name: state for name, state in known.items() if state is not None}
    found: Any = converted({id(t): t for t in _torch.tensors_of(known)}, kind, config)
    state = _torch.map_tensors(lambda tensor: found[id(tensor)], known)
    named: dict[str, Any] = {"state": state, "param_groups": []}
    for param_group in states["param_groups"]:
        keys = [key if isinstance(key, str) else names[key] for key in param_group["params"]]
        named["param_groups"].append({**param_group, "params": keys})
    if is_rank0_only(config) and not is_first_rank(model):
        return {}
    return named


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Turn a result of :func:`optim_state_dict` into a state dict that the optimizer loads.

    Args:
        model: The module with its parameters: a wrapper, or a module with wrappers below.
        optim: The optimizer.
        optim_state_dict: States by the names of parameters, on every rank.
        is_named_optimizer: Whether the optimizer itself keys its states by name.
        load_directly: Whether to load the result too.
        group: Accepted without effect; the mesh of each parameter decides.

    Raises:
        ValueError: If it has states of unknown parameters, if only the first rank has it
            (``rank0_only``), if it has no group for a parameter of the optimizer, or if that
            parameter is not in ``model``; on some ranks, if a local shard has the wrong shape.

    Collective: none, except to redistribute DTensors with other placements.
    """
    settings = get_state_dict_type(model)
    if is_rank0_only(settings.optim_state_dict_config):
        raise ValueError("Expected the optimizer's states on every rank, got rank0_only=True")
    params = _named_params(model, optim)
    unknown = sorted(set(optim_state_dict["state"]) - set(params))
    if unknown:
        raise ValueError(f"Expected states of the optimizer's parameters, got some of {unknown}")
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    keys = {name: name if is_named_optimizer else index for index, name in enumerate(params)}
    for name, states in optim_state_dict["state"].items():
        result["state"][keys[name]] = {
            kind: _as_state_of(params[name], (name, kind), value, is_local)
            for kind, value in states.items()
        }
    left, saved = iter(params), optim_state_dict["param_groups"]
    for param_group in optim.param_groups:
        names = list(islice(left, len(param_group["params"])))
        fitting = [group for group in saved if not names or names[0] in group["params"]]
        if not fitting:
            raise ValueError(
                f"Expected a group in param_groups with {names[:1]}, as optim_state_dict returns "
                f"them, got groups of {[group['params'] for group in saved]}"
            )
        result["param_groups"].append({**fitting[0], "params": [keys[name] for name in names]})
    if load_directly:
        optim.load_state_dict(result)
    return result


def _named_params(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by name, in its order."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for param_group in optim.param_groups for param in param_group["params"]]
    named = {names.get(id(param), ""): param for param in params}
    if "" in named:
        kind = type(model).__name__
        raise ValueError(f"Expected parameters of {kind} in the optimizer, got others")
    return named


def _as_state_of(param: torch.Tensor, names: tuple[str, str], value: Any, is_local: bool) -> Any:
    """Return a state for a parameter; a state of its shape gets its placements.

    Args:
        param: The parameter.
        names: The names of the parameter and of the state.
        value: The state.
        is_local: Whether states are local shards.
    """
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or names[1] == "step":
        return value
    if is_local:
        value = shard_of(param, value)
    if value.shape == param.shape:
        return sharded_like(param, value)
    if is_local and value.ndim == param.ndim:  # a shard from another number of ranks
        raise ValueError(
            f"Expected the shard of '{names[1]}' of '{names[0]}' to have shape "
            f"{list(_torch.local_tensor(param).shape)}, got {list(value.shape)}; load local shards "
            "on as many ranks as saved them, or full or sharded states"
        )
    return value
