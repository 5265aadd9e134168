"""The options of ``FullyShardedDataParallel``, and their meaning in the terms of ``fully_shard``.

Source: the names, fields and defaults of ``torch.distributed.fsdp`` and its ``wrap``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, _torch
from composable_shard.arguments import check_type, check_value
from composable_shard.train.wrap import inside_out

# Strategy, precision and offload ------------------------------------------------------------------

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""The ranks: one group, or a group that shards and a group that replicates."""


class ShardingStrategy(Enum):
    """Choose which ranks share parameters, and when the unsharded ones are freed.

    ``FULL_SHARD`` frees parameters after forward, ``SHARD_GRAD_OP`` after backward, ``NO_SHARD``
    never: it replicates them. ``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2`` are the first two within
    a node, replicated over the nodes.
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
        """The argument of ``fully_shard``: ``None`` frees all but the root's parameters."""
        return None if self.name in ("FULL_SHARD", "HYBRID_SHARD") else False


class BackwardPrefetch(Enum):
    """Choose when backward gathers the next parameters; accepted without effect.

    Backward prefetches the next group in the order that the last iteration recorded.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """Choose whether a state dict has full tensors, DTensors, or this rank's plain shards."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass(frozen=True)
class CPUOffload:
    """Choose whether shards, gradients and optimizer states are kept on the CPU."""

    offload_params: bool = False

    def policy(self) -> OffloadPolicy:
        """Return the policy for ``fully_shard``."""
        pins = torch.accelerator.is_available()
        return CPUOffloadPolicy(pin_memory=pins) if self.offload_params else OffloadPolicy()


@dataclass(frozen=True)
class MixedPrecision:
    """Choose the dtypes of compute, reduction and buffers.

    Args:
        param_dtype: Dtype of compute; ``None`` keeps that of the parameters.
        reduce_dtype: Dtype in which gradients are reduced; ``None`` means that of compute.
        buffer_dtype: Dtype of floating-point buffers during forward.
        keep_low_precision_grads: Whether sharded gradients stay in the dtype of the reduction.
        cast_forward_inputs: Whether a module below the root casts its inputs to ``param_dtype``.
        cast_root_forward_inputs: Whether the root casts its inputs.
        _module_classes_to_ignore: With an ``auto_wrap_policy``, modules that compute in the dtype
            of their parameters, between casts from and to ``param_dtype``.
        _output_dtype: Dtype that outputs are cast to.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_torch.BatchNorm,)
    _output_dtype: torch.dtype | None = None

    def exempts(self, module: nn.Module) -> bool:
        """Return whether a module computes in the dtype of its parameters."""
        return isinstance(module, tuple(self._module_classes_to_ignore))

    def exempted(self, module: nn.Module) -> MixedPrecision:
        """Return the precision of a module that is exempt, between casts."""
        held = (*module.parameters(), *module.buffers())
        own = next((tensor.dtype for tensor in held if tensor.is_floating_point()), None)
        return MixedPrecision(own, cast_forward_inputs=True, _output_dtype=self.param_dtype)

    def policy(self) -> MixedPrecisionPolicy:
        """Return the policy for ``fully_shard``; the wrapper casts the inputs."""
        reduce_dtype = self.reduce_dtype or self.param_dtype
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=reduce_dtype,  # else fully_shard takes the parameters' dtype
            output_dtype=self._output_dtype,
            cast_forward_inputs=False,
            buffer_dtype=self.buffer_dtype,
            grad_dtype=reduce_dtype if self.keep_low_precision_grads else None,
        )


@dataclass(frozen=True)
class Choices:
    """The arguments that a wrapper passes on to the wrappers that it makes below it.

    Raises:
        TypeError: If an argument has another type than its annotation.
    """

    process_group: ProcessGroups = None
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
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
        for name, hint in get_type_hints(Choices).items():
            kinds = [get_origin(kind) or kind for kind in get_args(hint) or [hint]]
            names = [f"{kind.__module__}.{kind.__name__}" for kind in kinds if kind is not NoneType]
            value = getattr(self, name)
            check_type(name, value, isinstance(value, tuple(kinds)), f"a {' or '.join(names)}")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Choices:
        """Select the choices among all arguments of a wrapper; ``None`` means the default."""
        given = {option.name: arguments[option.name] for option in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


# State dicts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateDictConfig:
    """Choose whether the tensors of a model's state dict are on the CPU."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """The choices for full tensors; with ``rank0_only`` the dicts of other ranks are empty."""

    rank0_only: bool = False


class LocalStateDictConfig(StateDictConfig):
    """The choices for this rank's shards."""


class ShardedStateDictConfig(StateDictConfig):
    """The choices for DTensors."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Choose whether the tensors of an optimizer's state dict are on the CPU."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The choices for full tensors; with ``rank0_only`` the dicts of other ranks are empty."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The choices for this rank's shards."""

    offload_to_cpu: bool = False


class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The choices for DTensors."""


@dataclass(frozen=True)
class StateDictSettings:
    """The choices for the state dicts of a wrapper and of its optimizer."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_of(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Return the settings for a type of state dicts; absent configs get their defaults.

    Raises:
        TypeError: If a config does not belong to the type.
    """
    check_type("state_dict_type", kind, isinstance(kind, StateDictType), "a StateDictType")
    configs: list[Any] = []
    for wanted, given in zip(_CONFIGS[kind], (config, optim_config), strict=True):
        configs.append(wanted() if given is None else given)
        fits = type(configs[-1]) is wanted
        check_type(f"the config for {kind}", given, fits, f"a {wanted.__name__}")
    return StateDictSettings(kind, *configs)


def is_rank0_only(config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Return whether only the first rank gets a state dict."""
    return getattr(config, "rank0_only", False)


# Which modules below get a wrapper of their own ---------------------------------------------------


class ModuleWrapPolicy:
    """Wrap the instances of some classes.

    Example:
        >>> ModuleWrapPolicy({nn.Linear})(nn.Linear(1, 1), recurse=False)
        True
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Act as a function policy."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(c.__name__ for c in self._module_classes)})"


class CustomPolicy:
    """Wrap the modules that a function picks.

    Args:
        lambda_fn: Returns whether to wrap a module, or a dict of arguments that replace those of
            the root for its wrapper.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def arguments_for(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the arguments of the wrapper for a module; ``None`` if it gets no wrapper.

        Raises:
            ValueError: If the function returns neither a bool nor a dict.
        """
        answer = self._lambda_fn(module)
        what = f"to return a bool or a dict of arguments for {type(module).__name__}"
        check_value("lambda_fn", answer, isinstance(answer, (bool, dict)), what)
        if not answer:
            return None
        return answer if isinstance(answer, dict) else {}


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module that has a forward."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which ``lambda_fn`` returns ``True``."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the instances of some classes; bind the classes by ``functools.partial``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] = (nn.MultiheadAttention,),
    exclude_wrap_modules: Collection[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
) -> bool:
    """Wrap modules with at least ``min_num_params`` elements outside of wrappers below them.

    Example:
        >>> size_based_auto_wrap_policy(nn.Linear(9, 9), False, 90, min_num_params=50)
        True
    """
    unfit = force_leaf_modules if recurse else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(unfit))


AutoWrapPolicy = Callable[..., bool] | ModuleWrapPolicy | CustomPolicy


def picked_by(
    policy: Any,
    root: nn.Module,
    left_alone: Collection[nn.Module],
    ignored: Collection[nn.Parameter],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below ``root`` that a policy picks, with arguments of their own.

    Args:
        policy: A policy object or function.
        root: The module that is being wrapped; never returned.
        left_alone: Ignored and wrapped modules, with all modules below them.
        ignored: Parameters to leave out of element counts.

    Raises:
        TypeError: If ``policy`` is neither a policy object nor a function.
        ValueError: If the function of a ``CustomPolicy`` returns neither a bool nor a dict.
    """
    picked, seen = dict[nn.Module, dict[str, Any]](), set(left_alone)
    if isinstance(policy, CustomPolicy):
        below = [module for module in inside_out(root, seen) if module is not root]
        answers = {module: policy.arguments_for(module) for module in below}
        return {module: own for module, own in answers.items() if own is not None}
    fits = callable(policy) and not isinstance(policy, type)
    what = "a function, a ModuleWrapPolicy or a CustomPolicy"
    check_type("auto_wrap_policy", policy, fits, what)

    def visit(module: nn.Module) -> int:
        """Call the policy before and after the children; return the elements in wrappers below."""
        if module in seen:
            return 0
        seen.add(module)
        numel = sum(p.numel() for p in module.parameters() if p not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(map(visit, module.children()))
        left = numel - wrapped
        if module is root or not policy(module=module, recurse=False, nonwrapped_numel=left):
            return wrapped
        picked[module] = {}
        return numel

    visit(root)
    return picked
