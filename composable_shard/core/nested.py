"""Tensors inside what modules take, return and store."""

from __future__ import annotations

import copy
import dataclasses
import operator
import weakref
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_shard import _torch

# Tensors inside what modules take, return and store: containers, dataclasses, plain objects -------

_Change = Callable[[torch.Tensor], torch.Tensor]

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
_ITERABLE: tuple[Any, ...] = (list, tuple, set, frozenset, deque, ValuesView, _ITEMS)

MAX_DEPTH_OF_OBJECTS = 3
"""How many plain objects inside each other are looked into."""

MANY = 64
"""A container of more items than these, the first of which is an atom, is one of atoms."""

_CLOSED_PACKAGES = ("torch", __name__.split(".")[0])
"""Whose objects hold no graph of the user's."""


class Given(NamedTuple):
    """A container that can be changed, and what stands in its place.

    Attributes:
        own: The container.
        shown: A copy of it around changed tensors, or itself if none is changed.
        before: What is in ``own``: a list, or a dict by key or by field.
        items: What is in ``shown``, in the same order.
    """

    own: Any
    shown: Any
    before: Any
    items: Any


def map_tensors(change: _Change, value: Any, given: list[Given] | None = None) -> Any:
    """Apply ``change`` to every tensor in ``value``; what holds no changed tensor stays itself.

    Goes into lists, tuples, named tuples, sets, mappings and their views, dataclass instances and
    the containers that are registered with ``torch.utils._pytree``. What refers to itself is copied
    as such.

    Args:
        change: The function.
        value: What a module takes or returns.
        given: Gets those containers that can be changed, for :func:`carry_over`.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in ATOMS:
        return value
    for one in given or ():
        if one.own is value:  # in a second place
            return one.shown
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _map_sequence(change, value, given)
    if isinstance(value, (_VALUES, _ITEMS)):
        return _map_view(change, value)
    if type(value) is dict or isinstance(value, Mapping):
        return _map_mapping(change, value, given)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(change, value, given)
    return _map_registered(change, value, given)


def _map_sequence(change: _Change, value: Any, given: list[Given] | None) -> Any:
    if isinstance(value, (list, deque)) and _is_cyclic(value):
        return _map_cyclic(change, value)
    items = [map_tensors(change, item, given) for item in value]
    if all(map(operator.is_, items, value)):
        mapped = value
    elif hasattr(value, "_fields"):
        mapped = type(value)(*items)
    elif isinstance(value, deque):
        mapped = type(value)(items, value.maxlen)
    else:
        mapped = type(value)(items)
    if given is not None and not isinstance(value, (tuple, frozenset)):
        given.append(Given(value, mapped, list(value), items))
    return mapped


def _map_view(change: _Change, value: Any) -> Any:
    """Return the same view of a changed copy of the dict behind."""
    items = {key: map_tensors(change, item) for key, item in value.mapping.items()}
    if all(items[key] is item for key, item in value.mapping.items()):
        return value
    return items.values() if isinstance(value, _VALUES) else items.items()


def _map_mapping(change: _Change, value: Any, given: list[Given] | None) -> Any:
    if _is_cyclic(value):
        return _map_cyclic(change, value)
    before = dict(value.items())
    items = {key: map_tensors(change, item, given) for key, item in before.items()}
    changed = {key: item for key, item in items.items() if item is not before[key]}
    if not changed:
        mapped = value
    elif type(value) is dict:
        mapped = dict(items)
    elif dataclasses.is_dataclass(value):
        mapped = _copy_of_both_kinds(value, items)
    else:
        mapped = value.copy() if hasattr(value, "copy") else type(value)(value)
        for key, item in changed.items():
            mapped[key] = item
    if given is not None and isinstance(value, MutableMapping):
        given.append(Given(value, mapped, before, items))
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


def _map_dataclass(change: _Change, value: Any, given: list[Given] | None) -> Any:
    if _is_cyclic(value):
        return _map_cyclic(change, value)
    before = _named_in(value)
    fields = [field.name for field in dataclasses.fields(value) if field.name in before]
    items = before | {name: map_tensors(change, before[name], given) for name in fields}
    mapped = value
    if not all(map(operator.is_, items.values(), before.values())):
        mapped = object.__new__(type(value))
        for name, item in items.items():
            object.__setattr__(mapped, name, item)
    if given is not None:
        given.append(Given(value, mapped, before, items))
    return mapped


def _map_registered(change: _Change, value: Any, given: list[Given] | None) -> Any:
    found = _torch.registered_container(value)
    if found is None:
        return value
    children, make = found
    items = [map_tensors(change, child, given) for child in children]
    return value if all(map(operator.is_, items, children)) else make(items)


def carry_over(given: Sequence[Given]) -> list[Any]:
    """Change containers as what stood in their places was changed.

    Args:
        given: What :func:`map_tensors` has added of them.

    Returns:
        What was put into them.
    """
    own = {id(one.shown): one.own for one in given}
    for one in given:
        own.update(zip(map(id, _values(one.items)), _values(one.before), strict=True))
    put: list[Any] = []
    for one in reversed(given):  # a copy of a copy came later
        put += (_carry_named if isinstance(one.items, dict) else _carry_sequence)(one, own)
    return put


def _values(items: Any) -> Iterable[Any]:
    return items.values() if isinstance(items, dict) else items


def _carry_sequence(one: Given, own: Mapping[int, Any]) -> list[Any]:
    now = list(one.shown)
    ids, known = list(map(id, now)), set(map(id, one.items))
    if ids == list(map(id, one.items)) or (isinstance(one.own, set) and set(ids) == known):
        return []
    if one.shown is not one.own:
        add = one.own.update if isinstance(one.own, set) else one.own.extend
        one.own.clear()
        add([own.get(id(item), item) for item in now])
    return [item for item in now if id(item) not in known]


def _carry_named(one: Given, own: Mapping[int, Any]) -> list[Any]:
    now = _named_in(one.shown)
    put = {
        name: item
        for name, item in now.items()
        if name not in one.items or one.items[name] is not item
    }
    if one.shown is not one.own:
        is_mapping = isinstance(one.own, Mapping)
        remove, add = (
            (type(one.own).__delitem__, type(one.own).__setitem__)
            if is_mapping
            else (object.__delattr__, object.__setattr__)
        )
        for name in one.items:
            if name not in now:
                remove(one.own, name)
        for name, item in put.items():
            add(one.own, name, own.get(id(item), item))
    return list(put.values())


def _named_in(value: Any) -> dict[Any, Any]:
    """Return the items of a mapping, or the fields and attributes of a dataclass instance."""
    if isinstance(value, Mapping):
        return dict(value.items())
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return getattr(value, "__dict__", {}) | fields


def _map_cyclic(change: _Change, value: Any) -> Any:
    """Map what refers to itself: a deep copy of its containers around what is not one."""
    memo: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # and kept, so that an id stays that of one object
    left, apart = [value], list[Any]()
    while left:
        one = left.pop()
        if type(one) in ATOMS or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            memo[id(one)] = change(one)
        else:
            children = _children(one)
            left += () if children is None else children
            apart += [one] if children is None else getattr(one, "__dict__", {}).values()
            apart += one if isinstance(one, Mapping) else ()
    if all(memo[id(tensor)] is tensor for tensor in tensors_in(value)):
        return value
    for one in apart:  # leaves, keys, and attributes that are no fields
        if id(one) not in seen or _children(one) is None:
            memo.setdefault(id(one), one)
    return copy.deepcopy(value, memo)


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


def holds_nothing(value: Any) -> bool:
    """Tell quickly whether ``value`` is one in which :func:`tensors_stored_in` never finds any."""
    kind = type(value)
    if kind is tuple:
        return all(type(item) in ATOMS for item in value)
    is_ours = kind.__module__.split(".")[0] == _CLOSED_PACKAGES[1]
    return kind in ATOMS or (is_ours and not issubclass(kind, (Mapping, *_ITERABLE)))


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


# What forward stores away on its modules, such as a loss to be added later ------------------------

_ATTRIBUTES_WITHOUT_GRAPH = frozenset(
    {*nn.Module().__dict__, _torch.COMPOSABLE_STATE, _torch.COMPOSABLE_REGISTRY}
)


class StoredTensors:
    """Finds the tensors with a graph that appear in the attributes of some modules.

    Most modules store nothing and keep their attributes from call to call. Those values that cannot
    hold a tensor are remembered, so that a look at such a module is one comparison of two lists.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._harmless: list[Any] = []  # of all modules, one behind the other
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def newly(self) -> list[torch.Tensor]:
        """Return those that were not there at the last call."""
        suspects: list[Any] = []
        values = [value for module in self._modules for value in module.__dict__.values()]
        harmless = self._harmless
        if len(values) != len(harmless) or not all(map(operator.is_, values, harmless)):
            self._harmless = self._sort(suspects)
        if not suspects and not self._known:
            return []
        known, self._known = self._known, {}
        seen: set[int] = set()
        found = []
        for value in suspects:
            for tensor in tensors_stored_in(value, seen):
                if tensor.grad_fn is None:
                    continue
                before = known.get(id(tensor))
                self._known[id(tensor)] = weakref.ref(tensor)
                if before is None or before() is not tensor:
                    found.append(tensor)
        return found

    def _sort(self, suspects: list[Any]) -> list[Any]:
        """Add to ``suspects`` what may hold tensors; return all values, ``self`` for those.

        It is no attribute of a module, so those will be looked into again.
        """
        harmless: list[Any] = []
        for module in self._modules:
            for name, value in module.__dict__.items():
                if name in _ATTRIBUTES_WITHOUT_GRAPH or holds_nothing(value):
                    harmless.append(value)
                else:
                    harmless.append(self)
                    suspects.append(value)
        return harmless
