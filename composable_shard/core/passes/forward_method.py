"""Methods that are called as a forward is: between the hooks of their module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from composable_shard.core.passes.hooks import run_as_forward


class ForwardMethod:
    """Stands on one module in the place of a method, and runs it as that module's forward.

    It is bound to the module like a function and holds no reference to it, so a deep copy of the
    module has the method bound to the copy.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        functools.update_wrapper(self, getattr(module, name))
        del self.__dict__["__wrapped__"]  # it is bound to this module
        self._bind = _binder(module, name)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_as_forward(module, self._bind(module), args, kwargs)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Run the method ``name`` of a sharded module as its forward; idempotent."""
    present = module.__dict__.get(name)
    if not isinstance(getattr(present, "__func__", None), ForwardMethod):
        module.__dict__[name] = MethodType(ForwardMethod(module, name), module)


def forward_methods(module: nn.Module) -> list[str]:
    """Return the names of the methods that are run as forward of a module."""
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(getattr(value, "__func__", None), ForwardMethod)
    ]


def _binder(module: nn.Module, name: str) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return what looks the method up for a module, this one or a copy of it."""
    if name in module.__dict__:
        own = module.__dict__[name]
        if isinstance(own, MethodType) and own.__self__ is module:
            return functools.partial(MethodType, own.__func__)
        return lambda _: own
    try:
        found = inspect.getattr_static(type(module), name)
    except AttributeError:  # it comes from __getattr__
        method = getattr(module, name)
        return lambda _: method
    return lambda owner: found.__get__(owner, type(owner))
