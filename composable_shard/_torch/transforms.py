"""The transforms of torch.func: whether one runs, and what it wraps."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

outside_transforms = temporarily_clear_interpreter_stack
"""A context in which none of the running transforms acts."""

_NOTHING = contextlib.nullcontext()


def is_transforming() -> bool:
    """Tell whether a transform runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def apart_from_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no transform acts; costs next to nothing where none runs."""
    return outside_transforms() if is_transforming() else _NOTHING


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tell whether a transform has wrapped ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def inner_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the innermost transform has wrapped into ``tensor``."""
    return torch._C._functorch.get_unwrapped(tensor)
