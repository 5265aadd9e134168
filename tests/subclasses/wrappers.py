"""A tensor class that wraps one tensor, as many of torchao do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only


class Wrapper(torch.Tensor):
    """Computes with what it wraps, and wraps what comes of it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: object) -> Any:
        return cls(inner["inner"])

    @classmethod
    def compute(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain, named = tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, cls.compute(func, plain, named))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None
