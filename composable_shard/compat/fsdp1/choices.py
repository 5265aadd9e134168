"""What a user of the first generation chooses: strategy, precision, offload, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_BATCH_NORMS: tuple[type[nn.Module], ...] = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""Over which ranks: one group, or one that shards and one that replicates."""


class ShardingStrategy(Enum):
    """Choose what is sharded, over which ranks, and what is kept after forward.

    ``FULL_SHARD`` frees parameters after forward, ``SHARD_GRAD_OP`` after backward, ``NO_SHARD``
    never: it replicates them. ``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2`` are the first two within
    a node, replicated over the nodes.

    Source: ``torch.distributed.fsdp.ShardingStrategy``.

    Example:
        >>> [strategy.name for strategy in ShardingStrategy if strategy.is_hybrid]
        ['HYBRID_SHARD', '_HYBRID_SHARD_ZERO2']
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether parameters are sharded over some ranks and replicated over others."""
        return self.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

    @property
    def reshard_after_forward(self) -> bool | None:
        """What ``fully_shard`` calls by this name: all but the root's parameters, or none."""
        return None if self.name in ("FULL_SHARD", "HYBRID_SHARD") else False


class BackwardPrefetch(Enum):
    """Choose when the next parameters are gathered in backward; a hint that changes nothing.

    The order of the last iteration is recorded, and the next group is gathered ahead by it.

    Source: ``torch.distributed.fsdp.BackwardPrefetch``.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass(frozen=True)
class CPUOffload:
    """Choose whether shards, gradients and optimizer states are kept on the CPU.

    Args:
        offload_params: The choice.

    Source: ``torch.distributed.fsdp.CPUOffload``.

    Example:
        >>> CPUOffload().policy()
        OffloadPolicy()
    """

    offload_params: bool = False

    def policy(self) -> OffloadPolicy:
        """Return what ``fully_shard`` takes."""
        if not self.offload_params:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())


@dataclass(frozen=True)
class MixedPrecision:
    """Choose the dtypes of compute, reduction and buffers.

    Args:
        param_dtype: Dtype of compute; ``None`` keeps that of the parameters.
        reduce_dtype: Dtype in which gradients are reduced; ``None`` means that of compute.
        buffer_dtype: Dtype of floating-point buffers during forward.
        keep_low_precision_grads: Whether sharded gradients stay in the dtype of the reduction.
        cast_forward_inputs: Whether a module below the root casts its inputs to ``param_dtype``.
        cast_root_forward_inputs: Whether the root does.
        _module_classes_to_ignore: With an ``auto_wrap_policy``, modules that compute in the dtype
            of their parameters, cast from and to ``param_dtype`` around.

    Raises:
        TypeError: If a dtype is not one, or a choice is not a bool.

    Source: ``torch.distributed.fsdp.MixedPrecision``.

    Example:
        >>> MixedPrecision(torch.bfloat16, keep_low_precision_grads=True).policy().grad_dtype
        torch.bfloat16
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = _BATCH_NORMS

    def __post_init__(self) -> None:
        for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Expected {name} to be a bool, got {getattr(self, name)!r}")
        self.policy()

    def policy(self) -> MixedPrecisionPolicy:
        """Return what ``fully_shard`` takes; inputs are cast by the wrapper."""
        kept = self.reduce_dtype or self.param_dtype
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=kept,  # which fully_shard takes from the parameters
            cast_forward_inputs=False,
            buffer_dtype=self.buffer_dtype,
            grad_dtype=kept if self.keep_low_precision_grads else None,
        )

    def exempts(self, module: nn.Module) -> bool:
        """Tell whether a module computes in its own dtype."""
        return isinstance(module, tuple(self._module_classes_to_ignore))

    def casts_inputs(self, is_root: bool) -> bool:
        """Tell whether a module casts its inputs."""
        casts = self.cast_root_forward_inputs if is_root else self.cast_forward_inputs
        return self.param_dtype is not None and casts


@dataclass(frozen=True)
class ExemptPrecision(MixedPrecision):
    """The precision of a module that is exempt: its own, between casts.

    Args:
        output_dtype: What outputs are cast back to.
    """

    output_dtype: torch.dtype | None = None

    def policy(self) -> MixedPrecisionPolicy:
        """Return what ``fully_shard`` takes."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype, output_dtype=self.output_dtype, cast_forward_inputs=False
        )

    @classmethod
    def of(cls, module: nn.Module, around: MixedPrecision) -> ExemptPrecision:
        """Return the precision of a module within one that computes in ``around``."""
        own = next(
            (t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()),
            None,
        )
        return cls(param_dtype=own, cast_forward_inputs=True, output_dtype=around.param_dtype)


@dataclass(frozen=True)
class Choices:
    """The arguments that a wrapper passes on to those that it makes below it.

    Raises:
        TypeError: If one has the wrong type.
    """

    process_group: ProcessGroups = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    backward_prefetch: BackwardPrefetch | None = None
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], object] | None = None
    device_id: int | str | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"Expected {name} to be a {kind.__module__}.{kind.__name__}, got "
                    f"{type(value).__module__}.{type(value).__name__}"
                )
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise TypeError(
                f"Expected param_init_fn to be callable, got {type(self.param_init_fn).__name__}"
            )

    def __deepcopy__(self, memo: object) -> Choices:
        return self  # frozen, and process groups cannot be copied

    def as_arguments(self) -> dict[str, Any]:
        """Return them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_KINDS: dict[str, type] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
    "device_mesh": DeviceMesh,
    **dict.fromkeys(
        ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"), bool
    ),
}
