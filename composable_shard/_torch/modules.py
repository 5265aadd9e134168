"""Calls of modules, the containers that they pass on, and torch's own ``fully_shard``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _WrappedHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _functional_call
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type
from torch.utils.hooks import RemovableHandle
from torch.version import __version__

# Where torch's ``fully_shard`` is imported from, by names that may be private; how it behaves -----

REDUCES_IN_GRAD_DTYPE = tuple(map(int, __version__.split(".")[:2])) >= (2, 15)
"""Whether gradients are reduced in the dtype of the parameter's, where a policy of torch names no
``reduce_dtype``; before torch 2.15 they were in ``param_dtype``."""

FULLY_SHARD_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)

# Calls of modules, and the containers that they pass on -------------------------------------------


def keep_from_compiling(package: str) -> None:
    """Have ``torch.compile`` leave the functions of a package as they are.

    Those that autograd calls while a compiled function runs a backward are compiled, if not, by
    themselves, which loses what they ask of the running backward.
    """
    from torch._dynamo import trace_rules  # takes as long as all of torch besides

    trace_rules.add(package)


_call_codes = {nn.Module._call_impl.__code__}

COMPOSABLE_STATE = STATE_KEY
"""Where functions of torch keep what they know of a module; another name in each process."""

COMPOSABLE_REGISTRY = REGISTRY_KEY
"""Where a module says which functions were applied to it; another name in each process."""


def composable_functions(module: nn.Module) -> Collection[str]:
    """Return the names of the functions made by torch's ``contract`` that were applied to it.

    Hazard: a wrapper, such as torch's of a checkpoint, passes attributes of its module off as its
    own. Guard: only what the wrapper itself holds is read. Test:
    ``test_a_checkpoint_wrapper_around_a_sharded_module``.
    """
    registry: Mapping[str, Any] = module.__dict__.get(REGISTRY_KEY) or {}
    return registry


def add_composable_function(module: nn.Module, name: str) -> None:
    """Have a module say that the function ``name`` was applied to it, as those of torch do."""
    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault(name, RegistryItem())


def modules_with_state() -> list[nn.Module]:
    """Return the modules that functions of torch keep a state of."""
    found = (ref() for ref in _module_state_mapping.keyrefs())  # copied, as others may add
    return [module for module in found if module is not None]


def list_module_state(module: nn.Module, state: Any) -> None:
    """Enter a module among those that torch keeps a state of, which must outlive the entry."""
    _module_state_mapping.setdefault(module, weakref.ref(state))


def hooks_on(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the number and the function of every hook on a module, of whatever kind."""
    for name, hooks in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            for number, hook in hooks.items():
                yield number, hook.hook if isinstance(hook, _WrappedHook) else hook


def reserve_hook_ids(module: nn.Module) -> None:
    """Let no hook that is registered later take the place of one that was unpickled."""
    used = [number for number, _ in hooks_on(module)]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(key + 1 for key in used)])


def in_functional_call() -> bool:
    """Tell whether torch.func.functional_call runs, which puts other tensors into modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def count_as_module_call(function: Any) -> None:
    """Have the frames of ``function`` found by :func:`module_call_frame`."""
    _call_codes.add(function.__code__)


def module_call_frame() -> FrameType | None:
    """Return the frame of the innermost running ``Module.__call__``, which outlives its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _call_codes:
        frame = frame.f_back
    return frame


def is_executing(frame: FrameType) -> bool:
    """Tell whether ``frame`` has not ended, on whatever thread; lets go of its locals if it has."""
    try:
        frame.clear()
    except RuntimeError:  # an executing frame cannot be cleared
        return True
    return False


def is_batch_norm(module: nn.Module) -> bool:
    """Tell whether a module is a batch norm of any number of dims, synchronized or not."""
    return isinstance(module, _BatchNorm)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that state dicts leave out."""
    return module._non_persistent_buffers_set


def state_dict_metadata(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what a state dict says about modules, by their names."""
    return getattr(state_dict, "_metadata", {})


def registered_container(value: Any) -> tuple[list[Any], Callable[..., Any]] | None:
    """Return what a container registered as a node of trees holds, and what makes another."""
    node = SUPPORTED_NODES.get(_get_node_type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda changed: node.unflatten_fn(changed, context)


def is_replicated(module: nn.Module) -> bool:
    """Tell whether ``replicate`` of torch, either of the two, or its DDP class has a module."""
    return "replicate" in composable_functions(module) or isinstance(
        module, DistributedDataParallel
    )
