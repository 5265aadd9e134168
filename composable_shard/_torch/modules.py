"""Calls of modules, containers in their inputs and outputs, and torch's own ``fully_shard``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.stateless import _functional_call
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type
from torch.utils.hooks import RemovableHandle
from torch.version import __version__

# Torch's ``fully_shard``: the modules that export it, and its behaviour by version ----------------

REDUCES_IN_GRAD_DTYPE = tuple(map(int, __version__.split(".")[:2])) >= (2, 15)
"""Whether torch reduces gradients in the parameter's gradient dtype if its policy names no
``reduce_dtype``; before torch 2.15 it reduced them in ``param_dtype``."""

FULLY_SHARD_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)

# Calls of modules, and containers in their inputs and outputs -------------------------------------


def keep_from_compiling(package: str) -> None:
    """Make ``torch.compile`` skip the functions of a package.

    Otherwise it compiles those that autograd calls while a compiled function runs a backward, and
    their queries about the running backward fail.
    """
    from torch._dynamo import trace_rules  # takes as long to import as the rest of torch

    trace_rules.add(package)


_call_codes = {nn.Module._call_impl.__code__}

COMPOSABLE_STATE = STATE_KEY
"""The attribute for the state of torch's composable functions; its name differs by process."""

COMPOSABLE_REGISTRY = REGISTRY_KEY
"""The attribute for the names of applied composable functions; its name differs by process."""


def composable_functions(module: nn.Module) -> Collection[str]:
    """Return the names of the composable functions (torch's ``contract``) applied to a module.

    Hazard: a wrapper, such as torch's ``CheckpointWrapper``, forwards attributes of its module.
    Guard: only the ``__dict__`` of the wrapper is read. Test:
    ``test_a_checkpoint_wrapper_around_a_sharded_module``.
    """
    registry: Mapping[str, Any] = module.__dict__.get(REGISTRY_KEY) or {}
    return registry


def add_composable_function(module: nn.Module, name: str) -> None:
    """Register the function ``name`` as applied to a module, as torch's ``contract`` does."""
    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault(name, RegistryItem())


def list_module_state(module: nn.Module, state: Any) -> None:
    """Register a module's state with torch, which only keeps a weak reference to the state."""
    _module_state_mapping.setdefault(module, weakref.ref(state))


def reserve_hook_ids(module: nn.Module) -> None:
    """Reserve the ids of unpickled hooks, so that no later hook replaces one."""
    kinds = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    used = [number for hooks in kinds if isinstance(hooks, dict) for number in hooks]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(number + 1 for number in used)])


def in_functional_call() -> bool:
    """Return whether ``torch.func.functional_call`` runs, which replaces tensors of modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def count_as_module_call(function: Any) -> None:
    """Let :func:`module_call_frame` find the frames of ``function``, too."""
    _call_codes.add(function.__code__)


def module_call_frame() -> FrameType | None:
    """Return the frame of the innermost running ``Module.__call__``, which outlives its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _call_codes:
        frame = frame.f_back
    return frame


def is_executing(frame: FrameType) -> bool:
    """Return whether ``frame`` still runs, on any thread; clear its locals if it has ended."""
    try:
        frame.clear()
    except RuntimeError:  # an executing frame cannot be cleared
        return True
    return False


BatchNorm = _BatchNorm
"""The base of batch norms of any number of dims, synchronized or not."""


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that state dicts leave out."""
    return module._non_persistent_buffers_set


def state_dict_metadata(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of modules in a state dict, by module name."""
    return getattr(state_dict, "_metadata", {})


def registered_container(value: Any) -> tuple[list[Any], Callable[..., Any]] | None:
    """Return the children of a registered pytree node, and a function that rebuilds the node."""
    node = SUPPORTED_NODES.get(_get_node_type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda changed: node.unflatten_fn(changed, context)


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` (either one) or its DDP class wraps a module."""
    return "replicate" in composable_functions(module) or isinstance(module, DDP)
