"""Tensor subclasses: the protocol by which they say what they send and how they come back.

A local shard with ``fsdp_pre_all_gather`` / ``fsdp_post_all_gather`` says itself which tensors
travel and what becomes of them. A wrapper subclass without them travels inner tensor by inner
tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.errors import ExtensionError

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def has_extension(tensor: torch.Tensor) -> bool:
    """Tell whether a local shard brings the protocol, on its class or on the object.

    Raises:
        TypeError: If it defines only one of the two methods.
    """
    pre, post = hasattr(tensor, PRE), hasattr(tensor, POST)
    if pre != post:
        found, missing = (PRE, POST) if pre else (POST, PRE)
        raise TypeError(
            f"Expected both {PRE} and {POST} on {type(tensor).__name__}, got only {found}; "
            f"define {missing} too"
        )
    return pre


def needs_extension(tensor: torch.Tensor) -> bool:
    """Tell whether a local shard cannot live in a flat bucket."""
    return has_extension(tensor) or _torch.is_wrapper_subclass(tensor)


def copied_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a local shard; one that brings the protocol without its own idea of a clone."""
    return _torch.cloned(tensor) if has_extension(tensor) else tensor.clone()


@dataclass(frozen=True)
class Format:
    """What one rank sends for one tensor; ``shape`` has the gathered dim first."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def bound_hook(hook: Any, tensor: torch.Tensor) -> Any:
    """Bind a plain function that was set on a tensor object and expects the tensor as ``self``."""
    if inspect.isfunction(hook) and next(iter(inspect.signature(hook).parameters), "") == "self":
        return hook.__get__(tensor)
    return hook


def flatten(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """Split wrapper subclasses into inner tensors; return them and a function that rebuilds."""
    flat: list[torch.Tensor] = []
    recipes: list[tuple[type, list[str], Any] | None] = []
    for tensor in tensors:
        if _torch.is_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = [getattr(tensor, name) for name in names]
            if any(part.shape != tensor.shape for part in inner):
                raise ExtensionError(
                    f"Expected the inner tensors of {type(tensor).__name__} to have its shape "
                    f"{list(tensor.shape)}, got {[list(part.shape) for part in inner]}; "
                    f"define {PRE} and {POST} on it"
                )
            flat += inner
            recipes.append((type(tensor), names, context))
        else:
            flat.append(tensor)
            recipes.append(None)

    def rebuild(parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        left = list(parts)
        rebuilt: list[torch.Tensor] = []
        for recipe in recipes:
            if recipe is None:
                rebuilt.append(left.pop(0))
                continue
            kind, names, context = recipe
            inner = {name: left.pop(0) for name in names}
            like = next(iter(inner.values()))
            rebuilt.append(
                kind.__tensor_unflatten__(inner, context, like.shape, like.stride())  # type: ignore[attr-defined]
            )
        return tuple(rebuilt)

    return flat, rebuild
