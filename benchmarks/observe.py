"""Observes the operations that torch runs, below autograd and DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Observer(TorchDispatchMode):
    """Observes every operation on plain tensors that this thread runs, also in backward.

    Views, operations within other operations and operations of other threads are not observed.
    """

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            self.saw(func, args, kwargs, result)
        return result

    def saw(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Called after an operation that is not a view."""
        raise NotImplementedError


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors within containers, except fake tensors of DTensor's shape inference."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            yield leaf


def nbytes(*values: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(*values))


def written(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    """Return the bytes that an operation has written, by its schema."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    given.update(kwargs)
    changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if changed:
        return nbytes([given.get(name) for name in changed])
    is_view = any(value.alias_info is not None for value in func._schema.returns)
    return 0 if is_view else nbytes(result)
