"""Tensors inside what modules take, return and store."""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.errors import ShardError

# Tensors inside what modules take, return and store: containers, dataclasses, plain objects -------

_Change = Callable[[torch.Tensor], torch.Tensor]
_Map = Callable[[Any], Any]

ATOMS: frozenset[type] = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
        *(torch.Size, torch.dtype, torch.device),
        *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    ]
)
"""Types that hold no tensors and are worth telling apart quickly."""

_VALUES: type = type({}.values())
_ITEMS: type = type({}.items())
_FIXED: tuple[Any, ...] = (tuple, frozenset, _VALUES, _ITEMS)
_ITERABLE: tuple[Any, ...] = (list, tuple, set, frozenset, deque, ValuesView, _ITEMS)

MAX_DEPTH_OF_OBJECTS = 3
"""How many plain objects inside each other are looked into."""

MANY = 64
"""A container of more items than these, the first of which is an atom, is one of atoms."""

_CLOSED_PACKAGES = ("torch", __name__.split(".")[0])
"""Whose objects hold no graph of the user's."""


class Given(NamedTuple):
    """A container that can be changed, and what forward gets in its place.

    Attributes:
        own: The container.
        shown: A copy of it around changed tensors, or itself if none is changed.
        items: What is in ``shown``.
    """

    own: Any
    shown: Any
    items: list[Any]


def map_tensors(
    change: _Change, value: Any, given: list[Given] | None = None, around: tuple[int, ...] = ()
) -> Any:
    """Apply ``change`` to every tensor in ``value``; what holds no changed tensor stays itself.

    Goes into lists, tuples, named tuples, sets, mappings and their views, dataclass instances and
    the containers that are registered with ``torch.utils._pytree``.

    Args:
        change: The function.
        value: What a module takes or returns.
        given: Gets those containers that can be changed, for :func:`find_changes`.
        around: The ids of the containers that ``value`` lies in.

    Raises:
        ShardError: If a container that holds itself has a tensor to change.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in ATOMS:
        return value
    number = id(value)
    if number in around:
        return value
    for one in given or ():
        if one.own is value:  # in a second place
            return one.shown
    inner = partial(map_tensors, change, given=given, around=(*around, number))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        mapped = _map_sequence(inner, value)
    elif isinstance(value, (_VALUES, _ITEMS)):
        mapped = _map_view(inner, value)
    elif isinstance(value, Mapping):
        mapped = _map_mapping(inner, value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = _map_dataclass(inner, value)
    else:
        return _map_registered(inner, value)
    if mapped is not value and type(value) is not tuple and _is_cyclic(value):
        raise ShardError(
            f"Expected inputs and outputs without containers that hold themselves, got a "
            f"{type(value).__name__} with itself inside and a tensor to cast or to watch; pass its "
            "tensors by themselves"
        )
    if given is not None and not isinstance(value, _FIXED):
        given.append(Given(value, mapped, _items_of(mapped)))
    return mapped


def _map_sequence(inner: _Map, value: Any) -> Any:
    items = list(map(inner, value))
    if all(map(operator.is_, items, value)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def _map_view(inner: _Map, value: Any) -> Any:
    """Return the same view of a changed copy of the dict behind."""
    items = {key: inner(item) for key, item in value.mapping.items()}
    if all(items[key] is item for key, item in value.mapping.items()):
        return value
    return items.values() if isinstance(value, _VALUES) else items.items()


def _map_mapping(inner: _Map, value: Any) -> Any:
    before = dict(value.items())
    items = {key: inner(item) for key, item in before.items()}
    changed = {key: item for key, item in items.items() if item is not before[key]}
    if not changed:
        return value
    if type(value) is dict:
        return items
    if dataclasses.is_dataclass(value):
        return _copy_of_both_kinds(value, items)
    mapped = value.copy() if hasattr(value, "copy") else type(value)(value)
    for key, item in changed.items():
        mapped[key] = item
    return mapped


def _copy_of_both_kinds(value: Any, items: Mapping[Any, Any]) -> Any:
    """Copy a mapping that is a dataclass too: not made of a mapping, and holds each item twice."""
    copied: Any = type(value).__new__(type(value))  # type: ignore[call-overload]
    copied.__dict__.update(value.__dict__)
    for key, item in items.items():
        copied[key] = item
        if isinstance(key, str) and getattr(value, key, None) is value[key]:
            object.__setattr__(copied, key, item)
    return copied


def _map_dataclass(inner: _Map, value: Any) -> Any:
    before = _named_in(value)
    fields = [field.name for field in dataclasses.fields(value) if field.name in before]
    items = before | {name: inner(before[name]) for name in fields}
    if all(map(operator.is_, items.values(), before.values())):
        return value
    mapped = object.__new__(type(value))
    for name, item in items.items():
        object.__setattr__(mapped, name, item)
    return mapped


def _map_registered(inner: _Map, value: Any) -> Any:
    found = _torch.registered_container(value)
    if found is None:
        return value
    children, make = found
    items = list(map(inner, children))
    return value if all(map(operator.is_, items, children)) else make(items)


def find_changes(given: Sequence[Given], label: str) -> tuple[list[Any], ShardError | None]:
    """Tell how forward has changed containers that it was given.

    Args:
        given: What :func:`map_tensors` has added of them.
        label: What messages call the module.

    Returns:
        What was put into them, and an error if one is a copy, whose changes the caller misses.
    """
    put, error = list[Any](), None
    for one in given:
        now = _items_of(one.shown)
        if len(now) == len(one.items) and all(map(operator.is_, now, one.items)):
            continue
        known = set(map(id, one.items))
        put += [item for item in now if id(item) not in known]
        if one.shown is not one.own:
            error = ShardError(
                f"Expected forward of {label} not to change a {type(one.own).__name__} whose "
                "tensors were cast or need gradients, of which it gets a copy, got it changed; "
                "return what it is to hold, or store that on the module"
            )
    return put, error


def _items_of(value: Any) -> list[Any]:
    """Return what is in a container, with the names where it has names."""
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return [part for pair in _named_in(value).items() for part in pair]
    return list(value)


def _named_in(value: Any) -> dict[Any, Any]:
    """Return the items of a mapping, or the fields and attributes of a dataclass instance."""
    if isinstance(value, Mapping):
        return dict(value.items())
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return getattr(value, "__dict__", {}) | fields


def _is_cyclic(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Tell whether a container is found within itself, or within one that is in it.

    Args:
        value: The container.
        around: The ids of those that it lies in.
    """
    if isinstance(value, torch.Tensor) or type(value) in ATOMS:
        return False
    if id(value) in around:
        return True
    around = (*around, id(value))
    return any(_is_cyclic(item, around) for item in _children(value) or ())


def _children(value: Any) -> Iterable[Any] | None:
    """Return what is in a container; ``None`` for what is none."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _ITERABLE):
        items: Iterable[Any] = value
        return items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [getattr(value, name) for name in names if hasattr(value, name)]
    found = _torch.registered_container(value)
    return None if found is None else found[0]


def tensors_in(value: Any, around: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``: in all that :func:`map_tensors` goes into.

    Args:
        value: What a module takes or returns.
        around: The ids of the containers that it lies in, which are not entered again.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in ATOMS and id(value) not in around:
        around = (*around, id(value))
        for item in _children(value) or ():
            yield from tensors_in(item, around)


def tensors_stored_in(
    value: Any, seen: set[int], depth: int = MAX_DEPTH_OF_OBJECTS
) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``, also in the attributes of plain objects.

    Args:
        value: An attribute of a module.
        seen: The containers and objects that were looked into; grows.
        depth: How many objects inside each other are looked into.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if type(value) in ATOMS or id(value) in seen or isinstance(value, (nn.Module, type)):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = value.values()
    elif isinstance(value, _ITERABLE):
        children = value
    elif depth and type(value).__module__.split(".")[0] not in _CLOSED_PACKAGES:
        children, depth = _attributes(value), depth - 1
    else:
        return
    if len(children) > MANY and type(next(iter(children))) in ATOMS:
        return
    for item in children:
        if type(item) not in ATOMS:
            yield from tensors_stored_in(item, seen, depth)


def _attributes(value: Any) -> list[Any]:
    attributes = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes.append(getattr(value, name))
    return attributes


# Buffers under mixed precision: cast during forward, kept in their own dtype otherwise ------------


class CastBuffers:
    """Puts floating-point buffers in another dtype in their places while forward runs.

    What forward wrote to such a buffer is copied back when it ends. Elements that it did not write
    keep their own precision.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._modules = list(modules) if dtype is not None else []
        self._dtype = dtype
        self._replaced: list[tuple[nn.Module, str, torch.Tensor]] = []

    @property
    def may_substitute(self) -> bool:
        """Whether there is anything that it could ever replace."""
        return bool(self._modules)

    def put(self) -> None:
        """Put the cast buffers in."""
        casts: dict[int, torch.Tensor] = {}  # several modules may share a buffer
        for module in self._modules:
            for name, buffer in list(module._buffers.items()):
                if buffer is None or not buffer.is_floating_point() or buffer.dtype == self._dtype:
                    continue
                if id(buffer) not in casts:
                    casts[id(buffer)] = buffer.to(self._dtype)
                module._buffers[name] = casts[id(buffer)]
                self._replaced.append((module, name, buffer))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back, but where forward has taken them out or put others in."""
        for module, name, buffer in self._replaced:
            current = module._buffers.get(name)
            if current is None:
                continue
            if current.shape != buffer.shape:
                module._buffers[name] = current.to(buffer.dtype)
                continue
            # batch norm writes its statistics without moving their version counters
            written = current != buffer.to(self._dtype)
            buffer.copy_(torch.where(written, current.to(buffer.dtype), buffer))
            module._buffers[name] = buffer
        self._replaced.clear()


class PreciseNormWeights:
    """Gives batch norms their weights in the dtype of their running statistics while forward runs.

    Batch norm takes inputs of a lower precision than its statistics, but no weights of one.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._norms = [module for module in modules if _torch.is_batch_norm(module)]
        self._replaced: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []

    @property
    def may_substitute(self) -> bool:
        """Whether there is anything that it could ever replace."""
        return bool(self._norms)

    def put(self) -> None:
        """Put the cast weights in; gradients reach the parameters through the cast."""
        for norm in self._norms:
            statistics = norm._buffers.get("running_mean")
            if statistics is None:
                continue
            for name, param in norm._parameters.items():
                if param is not None and param.dtype != statistics.dtype:
                    cast = param.to(statistics.dtype)
                    norm._parameters[name] = cast  # type: ignore[assignment]
                    self._replaced.append((norm, name, param, cast))

    def restore(self) -> None:
        """Register the parameters again, but where others have been registered meanwhile."""
        for norm, name, param, cast in self._replaced:
            if norm._parameters.get(name) is cast:
                norm._parameters[name] = param
        self._replaced.clear()
