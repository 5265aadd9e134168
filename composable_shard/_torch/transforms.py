"""The transforms of torch.func: whether one runs, and what it wraps."""

from __future__ import annotations

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

outside_transforms = temporarily_clear_interpreter_stack
"""A context in which none of the running transforms acts."""


def is_transforming() -> bool:
    """Tell whether a transform runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tell whether a transform has wrapped ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def inner_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the innermost transform has wrapped into ``tensor``."""
    return torch._C._functorch.get_unwrapped(tensor)
