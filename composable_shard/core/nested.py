"""Inputs and outputs of modules: tensors inside of containers, and buffers cast for forward."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.errors import ShardError

# Tensors inside of containers ---------------------------------------------------------------------

ATOMS: frozenset[type] = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
        *(torch.Size, torch.dtype, torch.device),
        *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    ]
)
"""Frequent types that contain no tensors; they are skipped without further checks."""

_MUTABLE = (list, set, deque, Mapping)

_VALUES: Any = type({}.values())
_ITEMS: Any = type({}.items())


class InputContainer(NamedTuple):
    """A container among the inputs, and the container that forward gets instead.

    Attributes:
        original: The container of the caller.
        passed: The container that forward gets: a copy with cast or marked tensors, or
            ``original`` itself if none of its tensors was changed.
        items: The items of ``passed`` before forward.
    """

    original: Any
    passed: Any
    items: list[Any]


def map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor],
    value: Any,
    seen: list[InputContainer] | None = None,
    enclosing: tuple[int, ...] = (),
) -> Any:
    """Apply ``change`` to every tensor in ``value``; return the same object if none has changed.

    This enters the containers of ``torch.utils._pytree``, dataclass instances, mappings, sets, and
    views of dicts.

    Args:
        change: The function.
        value: An input or output of a module.
        seen: The containers of earlier calls; this call adds its own, for :func:`find_changes`.
        enclosing: The ids of the containers around ``value``.

    Raises:
        ShardError: If a container contains itself.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in ATOMS:
        return value
    if id(value) in enclosing:
        kind = type(value).__name__
        raise ShardError(
            f"Expected no container that contains itself, got a {kind}; pass its items separately"
        )
    for known in seen or ():
        if known.original is value:  # the same container occurs twice
            return known.passed
    flattened = _flatten(value)
    if flattened is None:
        return value
    items, rebuild = flattened
    mapped = [map_tensors(change, item, seen, (*enclosing, id(value))) for item in items]
    passed = value if all(map(is_, mapped, items)) else rebuild(mapped)
    # Other containers may create new items each time pytree flattens them, which `find_changes`
    # would take for changes.
    if seen is not None and (isinstance(value, _MUTABLE) or dataclasses.is_dataclass(value)):
        seen.append(InputContainer(value, passed, mapped))
    return passed


def find_changes(
    containers: Sequence[InputContainer], label: str
) -> tuple[list[Any], ShardError | None]:
    """Find the containers among the inputs that forward has changed.

    Args:
        containers: The containers that :func:`map_tensors` has seen.
        label: The name of the module in messages.

    Returns:
        The items that forward has put into containers; an error if forward has changed a copy of a
        container, because the caller would not see the change.
    """
    added, error = list[Any](), None
    for original, passed, before in containers:
        after, _ = _flatten(passed) or ([], None)
        if len(after) == len(before) and all(map(is_, after, before)):
            continue
        ids_before = set(map(id, before))
        added += [item for item in after if id(item) not in ids_before]
        if passed is not original:
            error = ShardError(
                f"Expected forward of {label} not to change a {type(original).__name__}, got a "
                "change of its copy with cast or hooked tensors; return or store the new values"
            )
    return added, error


def tensors_in(value: Any, enclosing: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``, in the same containers as :func:`map_tensors`.

    Args:
        value: An input or output of a module.
        enclosing: The ids of the containers around ``value``, which are not entered again.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in ATOMS and id(value) not in enclosing:
        items, _ = _flatten(value) or ([], None)
        for item in items:
            yield from tensors_in(item, (*enclosing, id(value)))


def _flatten(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the items of a container, and a function that rebuilds it with other items."""
    registered = _torch.registered_container(value)
    if registered is not None:
        return registered
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value), type(value)
    if isinstance(value, (_VALUES, _ITEMS)):
        view = dict.values if isinstance(value, _VALUES) else dict.items
        keys = list(value.mapping)
        return list(value.mapping.values()), lambda items: view(dict(zip(keys, items, strict=True)))
    if isinstance(value, Mapping):
        named = dict(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        named = {name: getattr(value, name) for name in names if hasattr(value, name)}
        named = getattr(value, "__dict__", {}) | named
    else:
        return None
    return list(named.values()), partial(_copy_with, value, named)


def _copy_with(value: Any, named: Mapping[Any, Any], items: list[Any]) -> Any:
    """Copy a mapping or a dataclass instance (or an object that is both) with other items."""
    copied = copy.copy(value)
    for (name, before), item in zip(named.items(), items, strict=True):
        if item is before:
            continue
        if isinstance(value, Mapping):
            copied[name] = item
        if dataclasses.is_dataclass(value) and getattr(value, str(name), None) is before:
            object.__setattr__(copied, name, item)
    return copied


# Tensors of modules in another dtype while forward runs -------------------------------------------


class ForwardCasts:
    """Replaces tensors of modules by copies in another dtype while forward runs.

    It casts floating-point buffers to ``buffer_dtype``, and weights of batch norms to the dtype of
    the running statistics: inputs of a batch norm may have a lower precision than its statistics,
    but its weights may not. Gradients reach the parameters through the cast. :meth:`restore` copies
    back only the buffer elements that forward has written. The others keep their full precision.

    Attributes:
        is_needed: Whether there is anything to cast.
    """

    def __init__(self, modules: Sequence[nn.Module], buffer_dtype: torch.dtype | None) -> None:
        self._modules = [] if buffer_dtype is None else modules
        self._buffer_dtype: Any = buffer_dtype
        self._norms = [module for module in modules if isinstance(module, _torch.BatchNorm)]
        self._replaced: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self.is_needed = bool(self._modules or self._norms)

    def put(self) -> None:
        """Replace the buffers and weights by cast copies."""
        casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # modules may share a tensor
        for holder, name, tensor, dtype in self._to_cast():
            if tensor.dtype != dtype:
                key = id(tensor), dtype
                casts[key] = holder[name] = casts[key] if key in casts else tensor.to(dtype)
                self._replaced.append((holder, name, tensor, casts[key]))

    def _to_cast(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, torch.dtype]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    yield module._buffers, name, buffer, self._buffer_dtype
        for norm in self._norms:
            statistics = norm._buffers.get("running_mean")  # already cast
            for name, param in norm._parameters.items():
                if param is not None and statistics is not None:
                    yield norm._parameters, name, param, statistics.dtype

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the tensors, unless forward has removed or resized them, or replaced a weight."""
        for holder, name, tensor, cast in self._replaced:
            current, is_weight = holder.get(name), isinstance(tensor, nn.Parameter)
            if current is None or (is_weight and current is not cast):
                continue
            if current.shape != tensor.shape:
                tensor = current.to(tensor.dtype)
            elif not is_weight:
                # Compare values: batch norm writes its statistics without bumping their versions.
                written = current != tensor.to(cast.dtype)
                tensor.copy_(torch.where(written, current.to(tensor.dtype), tensor))
            holder[name] = tensor
        self._replaced.clear()
