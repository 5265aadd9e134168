"""Values as Python expressions that a person can paste into a test."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Any

INDENT = "    "
MAX_WIDTH = 88


def call_expression(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Write a call, one argument a line.

    Example:
        >>> print(call_expression("train", (["backward"],), {"lr": 0.1}))
        train(
            ['backward'],
            lr=0.1,
        )
    """
    parts = [expression(arg) for arg in args]
    parts += [f"{key}={expression(value)}" for key, value in kwargs.items()]
    return f"{name}(\n" + "".join(f"{_indented(part)},\n" for part in parts) + ")"


def expression(value: Any) -> str:
    """Write a value: functions by their names, dataclasses without what is default.

    Example:
        >>> from composable_shard import MixedPrecisionPolicy
        >>> import torch
        >>> expression((MixedPrecisionPolicy(torch.bfloat16), sum))
        '(MixedPrecisionPolicy(param_dtype=torch.bfloat16), sum)'
    """
    if is_dataclass(value) and not isinstance(value, type):
        shown = [one for one in fields(value) if one.init and not _is_default(value, one)]
        parts = [f"{one.name}={expression(getattr(value, one.name))}" for one in shown]
        return _joined(f"{type(value).__name__}(", parts, ")")
    if isinstance(value, partial):
        parts = [expression(part) for part in (value.func, *value.args)]
        parts += [f"{key}={expression(part)}" for key, part in value.keywords.items()]
        return _joined("partial(", parts, ")")
    if type(value) is tuple:
        return _joined("(", [expression(part) for part in value], ",)" if len(value) == 1 else ")")
    if type(value) is list:
        return _joined("[", [expression(part) for part in value], "]")
    if type(value) is dict:
        parts = [f"{expression(key)}: {expression(part)}" for key, part in value.items()]
        return _joined("{", parts, "}")
    return getattr(value, "__qualname__", None) or repr(value)


def _is_default(value: Any, one: Field[Any]) -> bool:
    own = getattr(value, one.name)
    if one.default_factory is not MISSING:
        return bool(own == one.default_factory())
    return one.default is not MISSING and bool(own == one.default)


def _joined(opening: str, parts: list[str], closing: str) -> str:
    line = opening + ", ".join(parts) + closing
    if len(line) <= MAX_WIDTH and "\n" not in line:
        return line
    body = "".join(f"{_indented(part)},\n" for part in parts)
    return f"{opening}\n{body}{closing.lstrip(',')}"


def _indented(text: str) -> str:
    return "\n".join(INDENT + line for line in text.split("\n"))
