"""What a user of the first generation chooses: strategy, precision, offload, which modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

# What a user of the first generation chooses: strategy, precision, offload, prefetch --------------

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

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Choices:
        """Return those among all arguments of a wrapper."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})

    def to_keep(self) -> Choices:
        """Return them without what only making a wrapper asks for, and what cannot be pickled."""
        return replace(self, process_group=None, device_mesh=None, param_init_fn=None)

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

# Which modules below get a wrapper of their own ---------------------------------------------------


class ModuleWrapPolicy:
    """Wrap the instances of some classes.

    Args:
        module_classes: The classes.

    Source: ``torch.distributed.fsdp.wrap.ModuleWrapPolicy``.

    Example:
        >>> ModuleWrapPolicy({nn.Linear})(nn.Linear(1, 1), recurse=False)
        True
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a function policy does."""
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(c.__name__ for c in self.module_classes)})"


class CustomPolicy:
    """Wrap the modules that a function picks.

    Args:
        lambda_fn: Returns for a module whether to wrap it, or a dict of arguments that replace
            those of the root there.

    Source: ``torch.distributed.fsdp.wrap.CustomPolicy``.

    Example:
        >>> policy = CustomPolicy(lambda module: isinstance(module, nn.Linear))
        >>> policy.arguments_for(nn.Linear(1, 1))
        {}
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self.lambda_fn = lambda_fn

    def arguments_for(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the arguments of the wrapper for a module, ``None`` if it gets none.

        Raises:
            ValueError: If the function returns something else.
        """
        answer = self.lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise ValueError(
                "Expected lambda_fn to return a bool or a dict of arguments, got "
                f"{type(answer).__name__} for {type(module).__name__}"
            )
        if isinstance(answer, dict):
            return answer
        return {} if answer else None


AutoWrapPolicy = Callable[..., bool] | ModuleWrapPolicy | CustomPolicy


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module that has a forward.

    Source: ``torch.distributed.fsdp.wrap.always_wrap_policy``.

    Example:
        >>> always_wrap_policy(nn.ReLU(), recurse=False, nonwrapped_numel=0)
        True
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which ``lambda_fn`` returns ``True``.

    Source: ``torch.distributed.fsdp.wrap.lambda_auto_wrap_policy``.

    Example:
        >>> lambda_auto_wrap_policy(nn.ReLU(), False, 0, lambda m: isinstance(m, nn.Linear))
        False
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the instances of some classes; bind them by ``functools.partial``.

    Source: ``torch.distributed.fsdp.wrap.transformer_auto_wrap_policy``.

    Example:
        >>> transformer_auto_wrap_policy(nn.Linear(1, 1), False, 2, {nn.Linear})
        True
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] = (nn.MultiheadAttention,),
    exclude_wrap_modules: Collection[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
) -> bool:
    """Wrap modules with many parameter elements that no wrapper below has taken.

    Args:
        module: The module.
        recurse: Whether the question is if to look below, not if to wrap.
        nonwrapped_numel: Its elements that are not wrapped.
        min_num_params: How many are many.
        force_leaf_modules: Classes below whose instances nothing is wrapped.
        exclude_wrap_modules: Classes whose instances are not wrapped.

    Source: ``torch.distributed.fsdp.wrap.size_based_auto_wrap_policy``.

    Example:
        >>> size_based_auto_wrap_policy(nn.Linear(9, 9), False, 90, min_num_params=50)
        True
    """
    unfit = force_leaf_modules if recurse else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(unfit))


# Choosing ---------------------------------------------------------------------------------------


def choose(
    root: nn.Module,
    policy: object,
    left_alone: Collection[nn.Module],
    ignored: Collection[nn.Parameter],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below ``root`` to wrap, inner ones first, with their own arguments.

    Args:
        root: The module that is being wrapped; never among them.
        policy: A policy object or function.
        left_alone: Modules that are ignored or wrapped, not looked into.
        ignored: Parameters that do not count.

    Raises:
        TypeError: If ``policy`` is neither.
    """
    if isinstance(policy, CustomPolicy):
        answers = ((m, policy.arguments_for(m)) for m in _inside_out(root, set(left_alone)))
        return {m: own for m, own in answers if own is not None and m is not root}
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "Expected auto_wrap_policy to be a function, a ModuleWrapPolicy or a CustomPolicy of "
            f"composable_shard.compat.fsdp1, got {type(policy).__name__}"
        )
    chooser = _Chooser(policy, set(left_alone), {id(param) for param in ignored})
    chooser.visit(root, is_root=True)
    return {module: {} for module in chooser.chosen}


def in_order(
    root: nn.Module, chosen: dict[nn.Module, dict[str, Any]]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return what is chosen, inner modules first, without containers that have no forward."""
    return [
        (module, chosen[module])
        for module in _inside_out(root, set())
        if module in chosen and type(module).forward is not nn.Module.forward
    ]


def _inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterable[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _inside_out(child, seen)
    yield module


class _Chooser:
    """Asks a function policy on the way down and on the way up."""

    def __init__(
        self, policy: Callable[..., bool], left_alone: set[nn.Module], ignored: set[int]
    ) -> None:
        self.chosen: list[nn.Module] = []
        self._policy = policy
        self._seen = left_alone
        self._ignored = ignored

    def visit(self, module: nn.Module, *, is_root: bool = False) -> int:
        """Return the elements that are wrapped below or with a module."""
        if module in self._seen:
            return 0
        self._seen.add(module)
        numel = sum(p.numel() for p in module.parameters() if id(p) not in self._ignored)
        if not self._policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(self.visit(child) for child in module.children())
        left = numel - wrapped
        if is_root or not self._policy(module=module, recurse=False, nonwrapped_numel=left):
            return wrapped
        self.chosen.append(module)
        return numel
