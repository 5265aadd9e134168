"""Checks of the arguments of public functions; their errors name the expected and given values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, SupportsFloat, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

_Item = TypeVar("_Item")

_LONGEST = 60
"""The maximum length, in characters, of a value that a message shows."""


def check_type(name: str, value: object, fits: bool, what: str, remedy: str = "") -> None:
    """Raise unless an argument has an accepted type.

    Args:
        name: The name of the argument.
        value: Its value.
        fits: Whether the type is accepted.
        what: The accepted types, in words.
        remedy: Advice, where the fix is not obvious.

    Raises:
        TypeError: Unless ``fits``.
    """
    if not fits:
        advice = f"; {remedy}" if remedy else ""
        raise TypeError(f"Expected {name} to be {what}, got {shown(value)}{advice}")


def check_value(name: str, value: object, fits: bool, what: str) -> None:
    """Raise unless an argument of the right type has an accepted value.

    Raises:
        ValueError: Unless ``fits``.
    """
    if not fits:
        raise ValueError(f"Expected {name} {what}, got {value!r}")


def shown(value: object) -> str:
    """Return the type of a value, and its ``repr`` if that is short and contains no address."""
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        return kind
    text = repr(value)
    is_short = len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text
    return f"{kind}: {text}" if is_short else kind


def checked_bool(name: str, value: object) -> bool:
    """Return ``value``; raise ``ValueError``, as torch does for flags, if it is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"Expected {name} to be a bool, got {shown(value)}")
    return value


def check_flags(**flags: object) -> None:
    """Raise ``ValueError`` unless all of these named values are bools."""
    for name, value in flags.items():
        checked_bool(name, value)


def check_int(name: str, value: Any, least: int) -> None:
    """Raise unless an argument is an int of at least ``least``.

    Raises:
        TypeError: If it is not an int; a bool is not one.
        ValueError: If it is less.
    """
    check_type(name, value, isinstance(value, int) and not isinstance(value, bool), "an int")
    check_value(name, value, value >= least, f"of at least {least}")


def checked_number(name: str, value: Any) -> float:
    """Return a number, or the value of a tensor with one element.

    Raises:
        TypeError: If it is not a number, such as a string or a bool.
    """
    number = None
    # A tensor of several elements raises RuntimeError.
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if isinstance(value, SupportsFloat) and not isinstance(value, bool):
            number = float(value)
    check_type(name, value, number is not None, "a number")
    assert number is not None
    return number


def check_function(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is callable or ``None``."""
    check_type(name, value, value is None or callable(value), "a function or None")


def call_for_parameter(what: str, fn: Callable[[Any], Any] | None, name: str, param: Any) -> Any:
    """Call a function of the user, if there is one; a note in its errors names the parameter."""
    try:
        return None if fn is None else fn(param)
    except Exception as error:
        error.add_note(f"raised by {what} for parameter '{name}'")
        raise


def check_dtype(name: str, value: Any) -> None:
    """Raise unless an argument is a floating-point or complex dtype, or ``None``.

    Raises:
        TypeError: If it is not a dtype.
        ValueError: If it is an integer or bool dtype.
    """
    if value is not None:
        check_type(name, value, isinstance(value, torch.dtype), "a torch.dtype or None")
        is_float = value.is_floating_point or value.is_complex
        check_value(name, value, is_float, "to be a floating-point dtype")


def checked_device(name: str, value: Any) -> torch.device:
    """Return the device for an argument that is a device or the name of one.

    Raises:
        TypeError: If the argument is neither.
        ValueError: If there is no device with that name.
    """
    fits = isinstance(value, (str, torch.device))
    check_type(name, value, fits, "a device or its name")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"Expected {name} to be a device, got {value!r}: {error}") from error


def check_path(name: str, value: object, *, is_needed: bool = True) -> None:
    """Raise ``TypeError`` unless an argument is a path, or ``None`` if a path is optional."""
    fits = isinstance(value, (str, os.PathLike)) or (value is None and not is_needed)
    check_type(name, value, fits, "a path" if is_needed else "a path or None")


def check_module(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is a module."""
    remedy = "call it for each" if isinstance(value, (list, tuple)) else ""
    check_type(name, value, isinstance(value, nn.Module), "an nn.Module", remedy)


def checked_list(name: str, value: Iterable[_Item], what: str, remedy: str = "") -> list[_Item]:
    """Return the elements of an iterable as a list; raise ``TypeError`` if it is not iterable."""
    check_type(name, value, isinstance(value, Iterable), what, remedy)
    return list(value)


def check_process_group(value: object) -> None:
    """Raise unless ``process_group`` is a process group, behaves like one, or is ``None``.

    Raises:
        TypeError: If it is anything else, such as the result of ``new_group`` on a rank outside of
            the group.
    """
    is_like_group = all(callable(getattr(value, name, None)) for name in ("rank", "size"))
    what = "a ProcessGroup that this rank is in"
    remedy = "pass its mesh.get_group()" if isinstance(value, dist.DeviceMesh) else ""
    check_type("process_group", value, value is None or is_like_group, what, remedy)


def listed_optimizers(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return a list of the given optimizers; raise ``TypeError`` for anything else."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    what = "an Optimizer or a list of optimizers"
    given = checked_list("optimizer", optimizer, what)
    for member in given:
        check_type("optimizer", member, isinstance(member, Optimizer), what)
    return given
