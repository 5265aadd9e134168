"""State dicts of optimizers: by the names of parameters, full, sharded or local."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.compat.fsdp1.saving import get_state_dict_type
from composable_shard.compat.fsdp1.state_dict_types import (
    StateDictType,
    converted,
    is_first_rank,
    is_rank0_only,
    local_like,
    names_of,
    sharded_like,
)


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer by the names of parameters.

    Args:
        model: The module whose parameters it has: a wrapper, or one with wrappers below.
        optim: The optimizer.
        optim_state_dict: Its state dict, if it was taken already.
        group: Accepted; the ranks are those of each parameter.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`` with tensors
        as the state dict type says; empty on other ranks than the first with ``rank0_only``.

    Raises:
        ValueError: If the optimizer has a parameter that is not of ``model``.

    Collective: for full tensors, a gather of each.

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
    names = _names(model, optim)
    named: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, name in enumerate(names):
        if index in states["state"]:
            named["state"][name] = {
                key: converted(value, kind, config) if isinstance(value, torch.Tensor) else value
                for key, value in states["state"][index].items()
            }
    for own in states["param_groups"]:
        named["param_groups"].append({**own, "params": [names[i] for i in own["params"]]})
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
    """Turn what :func:`optim_state_dict` returned into what the optimizer loads.

    Args:
        model: The module whose parameters it has: a wrapper, or one with wrappers below.
        optim: The optimizer.
        optim_state_dict: States by the names of parameters, on every rank.
        is_named_optimizer: Whether the optimizer has its states by name itself.
        load_directly: Whether to load it too.
        group: Accepted; the ranks are those of each parameter.

    Raises:
        ValueError: If it has states of other parameters, or only the first rank has it
            (``rank0_only``), or the optimizer has a parameter that is not of ``model``.

    Collective: none, but for DTensors that are sharded in another way.
    """
    settings = get_state_dict_type(model)
    if is_rank0_only(settings.optim_state_dict_config):
        raise ValueError(
            "Expected the optimizer's states on every rank, got rank0_only=True; read them on "
            "every rank and set it to False"
        )
    names = _names(model, optim)
    unknown = sorted(set(optim_state_dict["state"]) - set(names))
    if unknown:
        raise ValueError(
            f"Expected states of parameters that the optimizer has, got some of {unknown}"
        )
    params = [param for own in optim.param_groups for param in own["params"]]
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, (name, param) in enumerate(zip(names, params, strict=True)):
        if name in optim_state_dict["state"]:
            result["state"][name if is_named_optimizer else index] = {
                key: _as_state_of(param, key, value, is_local)
                for key, value in optim_state_dict["state"][name].items()
            }
    index = 0
    for own in optim.param_groups:
        members = range(index, index + len(own["params"]))
        index = members.stop
        saved = next(
            saved
            for saved in optim_state_dict["param_groups"]
            if not members or names[members[0]] in saved["params"]
        )
        keys = [names[i] if is_named_optimizer else i for i in members]
        result["param_groups"].append({**saved, "params": keys})
    if load_directly:
        optim.load_state_dict(result)
    return result


def _names(model: nn.Module, optim: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order."""
    by_identity = names_of(model)
    names = []
    for own in optim.param_groups:
        for param in own["params"]:
            if id(param) not in by_identity:
                raise ValueError(
                    f"Expected an optimizer of the parameters of {type(model).__name__}, got one "
                    f"of another parameter of shape {list(param.shape)}"
                )
            names.append(by_identity[id(param)])
    return names


def _as_state_of(param: torch.Tensor, key: str, value: Any, is_local: bool) -> Any:
    """Return a state of a parameter, sharded as it is if it has its shape."""
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or key == "step":
        return value
    if is_local and not isinstance(value, DTensor):
        is_shard = value.shape == _torch.local_tensor(param).shape
        return local_like(param, value) if is_shard else value
    return sharded_like(param, value) if value.shape == param.shape else value
