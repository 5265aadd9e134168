"""What a user of the first generation chooses, in the terms of ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from composable_shard.compat.fsdp1.options import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)

# Strategy, precision and offload ------------------------------------------------------------------

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""Over which ranks: one group, or one that shards and one that replicates."""


def is_hybrid(strategy: ShardingStrategy) -> bool:
    """Tell whether parameters are sharded over some ranks and replicated over others."""
    return strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def reshard_after_forward(strategy: ShardingStrategy) -> bool | None:
    """Return what ``fully_shard`` calls by this name: all but the root's parameters, or none."""
    return None if strategy.name in ("FULL_SHARD", "HYBRID_SHARD") else False


def offload_policy(offload: CPUOffload | None) -> OffloadPolicy:
    """Return the policy for ``fully_shard``."""
    if offload is None or not offload.offload_params:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())


@dataclass(frozen=True)
class ExemptPrecision(MixedPrecision):
    """The precision of a module that computes in its own dtype, between casts.

    Args:
        output_dtype: The dtype that outputs are cast back to.
    """

    output_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, module: nn.Module, around: MixedPrecision) -> ExemptPrecision:
        """Return the precision of a module within one that computes in ``around``."""
        own = next(
            (t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()),
            None,
        )
        return cls(param_dtype=own, cast_forward_inputs=True, output_dtype=around.param_dtype)


def precision_policy(precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    """Return the policy for ``fully_shard``; the wrapper casts the inputs."""
    if precision is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    if isinstance(precision, ExemptPrecision):
        return MixedPrecisionPolicy(
            precision.param_dtype, output_dtype=precision.output_dtype, cast_forward_inputs=False
        )
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=reduce_dtype,  # which fully_shard takes from the parameters
        cast_forward_inputs=False,
        buffer_dtype=precision.buffer_dtype,
        grad_dtype=reduce_dtype if precision.keep_low_precision_grads else None,
    )


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

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Choices:
        """Select the choices among all arguments of a wrapper."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})

    def to_keep(self) -> Choices:
        """Return the choices that are still needed after construction, and can be pickled."""
        return replace(self, process_group=None, device_mesh=None, param_init_fn=None)


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

# Which modules below get a wrapper of their own ---------------------------------------------------

AutoWrapPolicy = Callable[..., bool] | ModuleWrapPolicy | CustomPolicy


def choose(
    root: nn.Module,
    policy: object,
    left_alone: Collection[nn.Module],
    ignored: Collection[nn.Parameter],
    arguments: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below ``root`` to wrap, with their arguments.

    Args:
        root: The module that is being wrapped; never among them.
        policy: A policy object or function.
        left_alone: Modules that are ignored or wrapped, and all below them.
        ignored: Parameters that do not count.
        arguments: The arguments, which a ``CustomPolicy`` may replace.

    Raises:
        TypeError: If ``policy`` is neither.
        ValueError: If the function of a ``CustomPolicy`` returns neither a bool nor a dict.
    """
    if isinstance(policy, CustomPolicy):
        below = (module for module in inside_out(root, set(left_alone)) if module is not root)
        answers = ((module, policy.arguments_for(module)) for module in below)
        return {module: {**arguments, **own} for module, own in answers if own is not None}
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "Expected auto_wrap_policy to be a function, a ModuleWrapPolicy or a CustomPolicy, got "
            f"{type(policy).__name__}"
        )
    chosen, seen, ignored_ids = {}, set(left_alone), {id(param) for param in ignored}

    def visit(module: nn.Module) -> int:
        """Ask on the way down and on the way up; return the elements below that are wrapped."""
        if module in seen:
            return 0
        seen.add(module)
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored_ids)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(map(visit, module.children()))
        if module is root:
            return wrapped
        if not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return wrapped
        chosen[module] = dict(arguments)
        return numel

    visit(root)
    return chosen


def inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield all modules, children before parents, each once."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from inside_out(child, seen)
    yield module
