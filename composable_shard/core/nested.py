"""Tensors inside what modules take and return: containers, dataclasses, views of dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, ValuesView
from typing import Any

import torch

_Change = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(change: _Change, value: Any) -> Any:
    """Apply ``change`` to every tensor in ``value``; what holds no changed tensor stays itself.

    Goes into lists, tuples, named tuples, mappings and dataclass instances.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return _map_sequence(change, value)
    if isinstance(value, Mapping):
        return _map_mapping(change, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(change, value)
    return value


def _map_sequence(change: _Change, value: Any) -> Any:
    items = [map_tensors(change, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def _map_mapping(change: _Change, value: Any) -> Any:
    items = {key: map_tensors(change, item) for key, item in value.items()}
    if all(items[key] is value[key] for key in items):
        return value
    if type(value) is dict:
        return items
    copied = value.copy() if hasattr(value, "copy") else type(value)(value)
    for key, item in items.items():
        copied[key] = item
    return copied


def _map_dataclass(change: _Change, value: Any) -> Any:
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    items = {name: map_tensors(change, getattr(value, name)) for name in fields}
    if all(items[name] is getattr(value, name) for name in fields):
        return value
    copied = object.__new__(type(value))
    copied.__dict__.update(getattr(value, "__dict__", {}))
    for name, item in items.items():
        object.__setattr__(copied, name, item)
    return copied


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``, also in views of dicts and sets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset, ValuesView, type({}.items()))):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from tensors_in(getattr(value, field.name))
