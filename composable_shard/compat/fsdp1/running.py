"""What a wrapper does around the forward of the wrapped module."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from composable_shard import ShardError, _torch, unsharded
from composable_shard.core.passes.context import Context
from composable_shard.core.passes.nested import map_tensors

if TYPE_CHECKING:
    from composable_shard.compat.fsdp1.module import FullyShardedDataParallel

_EVAL_VARIABLES = ("COMPOSABLE_SHARD_FULL_PRECISION_IN_EVAL", "FSDP_USE_FULL_PREC_IN_EVAL")

_HOMOGENEOUS: dict[str, Callable[[FullyShardedDataParallel], bool]] = {
    "use_orig_params": lambda wrapper: wrapper.fsdp_choices.use_orig_params,
    "limit_all_gathers": lambda wrapper: wrapper.fsdp_choices.limit_all_gathers,
    _EVAL_VARIABLES[0]: lambda wrapper: wrapper.fsdp_full_precision_in_eval,
}


def full_precision_in_eval() -> bool:
    """Tell whether the environment asks for evaluation in the dtype of the parameters."""
    return any(os.environ.get(name) == "1" for name in _EVAL_VARIABLES)


_checked: weakref.WeakSet[Context] = weakref.WeakSet()


def check_tree(root: FullyShardedDataParallel) -> None:
    """Check all wrappers below a root, once; have new optimizers step in backward.

    Raises:
        ValueError: If wrappers disagree on what must be the same in all.
        RuntimeError: For an optimizer in backward without ``use_orig_params``.
    """
    contexts = [group.context for group in root.fsdp_groups()]
    if not all(context in _checked for context in contexts):
        wrappers = root.fsdp_modules(root)
        for name, value_of in _HOMOGENEOUS.items():
            values = sorted({value_of(wrapper) for wrapper in wrappers})
            if len(values) > 1:
                raise ValueError(
                    f"Expected one homogeneous value for {name} in nested wrappers, got {values}; "
                    "pass the same to all"
                )
        _checked.update(contexts)
    if torch.is_grad_enabled():
        _step_in_backward(root)


def _step_in_backward(root: FullyShardedDataParallel) -> None:
    """Have optimizers step as soon as the gradient of their parameter is reduced."""
    for group in (member for top in root.fsdp_groups() for member in top.context.groups):
        for param in group.params:
            if not _torch.optimizers_in_backward(param.sharded):
                continue
            if not root.fsdp_choices.use_orig_params:
                raise RuntimeError(
                    f"Expected no optimizer in backward, got one of '{param.name}' of "
                    f"{group.label}, which is only supported with use_orig_params=True"
                )
            if step_and_clear not in _torch.gradient_hooks(param.sharded):
                param.sharded.register_post_accumulate_grad_hook(step_and_clear)


def step_and_clear(param: torch.Tensor) -> None:
    """Take the steps of a parameter's optimizers in backward, and drop its gradient."""
    for optimizer in _torch.optimizers_in_backward(param):
        optimizer.step()
    param.grad = None


@contextlib.contextmanager
def precision(wrapper: FullyShardedDataParallel) -> Iterator[bool]:
    """Give the dtype of compute: yield whether it is that of the policy.

    Otherwise full parameters in their own dtype are registered, which costs their gather.

    Raises:
        ShardError: If gradients are on where full parameters are asked for.
    """
    lowers = wrapper.module.training or not wrapper.fsdp_full_precision_in_eval
    if lowers or wrapper.mixed_precision.param_dtype is None:
        yield True
        return
    if torch.is_grad_enabled():
        raise ShardError(
            "Expected torch.no_grad() around a forward in evaluation with full precision, got "
            f"gradients enabled; or unset {' and '.join(_EVAL_VARIABLES)}"
        )
    with unsharded(wrapper.module, recurse=False, writeback=False):
        yield False


def cast_inputs(
    dtype: torch.dtype, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the floating-point tensors in inputs."""
    cast: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(partial(_cast, dtype), inputs)
    return cast


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
