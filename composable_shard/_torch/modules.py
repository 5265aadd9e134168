"""Calls of modules, and the containers that they pass on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import SUPPORTED_NODES

_call_codes = {nn.Module._call_impl.__code__}


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


def registered_children(value: Any) -> Sequence[Any]:
    """Return what a container holds whose class is registered as a node of trees, else nothing."""
    node = SUPPORTED_NODES.get(type(value))
    return () if node is None else list(node.flatten_fn(value)[0])


def map_registered_container(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to what a registered container holds; if nothing changes, return itself."""
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        return value
    children, context = node.flatten_fn(value)
    changed = [change(child) for child in children]
    if all(new is old for new, old in zip(changed, children, strict=True)):
        return value
    return node.unflatten_fn(changed, context)
