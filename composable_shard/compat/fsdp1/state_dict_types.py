"""State dicts of a wrapped model: full, sharded or local, under the names of the plain model."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch


class StateDictType(Enum):
    """Choose what a state dict holds: full tensors, DTensors, or this rank's shards as they are.

    Source: ``torch.distributed.fsdp.StateDictType``.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass(frozen=True)
class StateDictConfig:
    """Choose where the tensors of a state dict are.

    Args:
        offload_to_cpu: Whether on the CPU.

    Source: the class of the same name in ``torch.distributed.fsdp``, as all of these.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """The choices for full tensors.

    Args:
        rank0_only: Whether only the first rank has them; the dicts of others are empty.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """The choices for this rank's shards."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """The choices for DTensors."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Choose where the tensors of an optimizer's state dict are.

    Args:
        offload_to_cpu: Whether on the CPU.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The choices for full tensors.

    Args:
        rank0_only: Whether only the first rank has them; the dicts of others are empty.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The choices for this rank's shards."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The choices for DTensors."""


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """What the state dicts of a wrapper and of its optimizer hold.

    Raises:
        TypeError: If a config is not that of the type.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)

    @classmethod
    def of(
        cls,
        state_dict_type: StateDictType,
        config: StateDictConfig | None = None,
        optim_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Fill in the configs of a type that are not given."""
        if not isinstance(state_dict_type, StateDictType):
            raise TypeError(
                "Expected state_dict_type to be a StateDictType of composable_shard.compat.fsdp1, "
                f"got {type(state_dict_type).__name__}"
            )
        kinds = _CONFIGS[state_dict_type]
        return cls(
            state_dict_type,
            kinds[0]() if config is None else config,
            kinds[1]() if optim_config is None else optim_config,
        )

    def __post_init__(self) -> None:
        kinds = _CONFIGS[self.state_dict_type]
        for config, kind in zip(
            (self.state_dict_config, self.optim_state_dict_config), kinds, strict=True
        ):
            if type(config) is not kind:
                raise TypeError(
                    f"Expected a {kind.__name__} for {self.state_dict_type}, got "
                    f"{type(config).__name__}"
                )


def is_rank0_only(config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Tell whether only the first rank is to have anything."""
    full = (FullStateDictConfig, FullOptimStateDictConfig)
    return isinstance(config, full) and config.rank0_only


def is_first_rank(module: nn.Module) -> bool:
    """Tell whether this rank is the first of those that share the parameters of a module."""
    for param in module.parameters():
        if isinstance(param, DTensor):
            return not any(param.device_mesh.get_coordinate() or ())
    return not dist.is_initialized() or dist.get_rank() == 0


# Tensors ----------------------------------------------------------------------------------------


def converted(
    value: torch.Tensor,
    kind: StateDictType,
    config: StateDictConfig | OptimStateDictConfig,
) -> torch.Tensor:
    """Return what a state dict of a kind holds for a tensor. Collective: its gather, if full."""
    if isinstance(value, DTensor) and kind is StateDictType.FULL_STATE_DICT:
        sharded = cast(DTensor, value.detach())
        if sharded.device.type != sharded.device_mesh.device_type:
            sharded = cast(DTensor, sharded.to(sharded.device_mesh.device_type))
        full = sharded.full_tensor()
        value = full if config.offload_to_cpu and not full.is_cpu else full.clone()
    elif isinstance(value, DTensor) and kind is StateDictType.LOCAL_STATE_DICT:
        value = _torch.local_tensor(value).detach()
    return value.cpu() if config.offload_to_cpu else value


def sharded_like(param: DTensor, value: torch.Tensor) -> DTensor:
    """Return a tensor of a parameter's shape, full or sharded in any way, sharded as it is.

    Collective: none for a full one.
    """
    mesh, local = param.device_mesh, _torch.local_tensor(param)
    if isinstance(value, DTensor) and value.device_mesh == mesh:
        return value.redistribute(placements=param.placements)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    spec = _torch.spec_with_dtype(_torch.spec_of(param), value.dtype)
    cut = _torch.cut(value, mesh, param.placements)
    return _torch.from_local(cut.to(local.device, copy=True), spec)


def local_like(param: DTensor, value: torch.Tensor) -> DTensor:
    """Return this rank's shard of a parameter as the DTensor that it is part of."""
    spec = _torch.spec_with_dtype(_torch.spec_of(param), value.dtype)
    return _torch.from_local(value, spec)


# Names ------------------------------------------------------------------------------------------


def rename_keys(states: MutableMapping[str, Any], old: str, new: str) -> None:
    """Replace the prefix of those keys that have it, in place and in their order."""
    for key in [key for key in states if key.startswith(old)]:
        states[new + key.removeprefix(old)] = states.pop(key)


def names_of(module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its identity."""
    return {id(param): name for name, param in module.named_parameters()}
