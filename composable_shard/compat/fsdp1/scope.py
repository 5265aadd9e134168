"""What of a module one wrapper takes charge of: not what is ignored, nor what is wrapped below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from composable_shard import FSDPModule


@dataclass(frozen=True)
class Scope:
    """The modules of one wrapper.

    Attributes:
        modules: Those it takes charge of, the wrapped one first.
        ignored_modules: Those that are left as they are, with all below them.
        ignored_params: Parameters that are left as they are.
    """

    modules: tuple[nn.Module, ...]
    ignored_modules: frozenset[nn.Module]
    ignored_params: frozenset[nn.Parameter]

    def slots(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yield the parameters with the places where they are registered."""
        for module in self.modules:
            for name, param in module._parameters.items():
                if param is not None and param not in self.ignored_params:
                    yield module, name, param

    def params(self) -> list[nn.Parameter]:
        """Return the parameters, each once."""
        return list(dict.fromkeys(param for _, _, param in self.slots()))

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers, each once."""
        return list(dict.fromkeys(b for module in self.modules for b in module.buffers(False)))


def scope_of(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Scope:
    """Find what a wrapper of ``module`` takes charge of.

    Raises:
        TypeError: If something ignored is neither a parameter nor a module.
        ValueError: If both arguments are given, parameters and modules are mixed, or something
            ignored is sharded.
    """
    modules, params = _read(ignored_modules, ignored_states)
    ignored = frozenset(inner for outer in modules for inner in outer.modules())
    for inner in ignored:
        if isinstance(inner, FSDPModule):
            raise ValueError(
                f"Expected ignored modules that are not sharded, got {type(inner).__name__}"
            )
    kept = frozenset([*params, *(param for inner in ignored for param in inner.parameters(False))])
    return Scope(tuple(_walk(module, ignored)), ignored, kept)


def _read(
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Expected ignored_modules or ignored_states, got both; pass ignored_states"
        )
    modules = list(ignored_modules or ())
    for inner in modules:
        if not isinstance(inner, nn.Module):
            raise TypeError(f"Expected ignored_modules to be modules, got {type(inner).__name__}")
    states = list(ignored_states or ())
    params = [state for state in states if isinstance(state, nn.Parameter)]
    if params and len(params) < len(states):
        raise ValueError(
            "Expected ignored_states to be parameters or modules, got both kinds mixed"
        )
    for state in states if not params else ():
        if not isinstance(state, nn.Module):
            raise TypeError(
                f"Expected ignored_states to be parameters or modules, got {type(state).__name__}"
            )
        modules.append(state)
    return modules, params


def _walk(top: nn.Module, ignored: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules from the top down, each once, but what is ignored or sharded."""
    left, seen = [top], set[nn.Module]()
    while left:
        module = left.pop()
        if module in seen or module in ignored:
            continue
        if isinstance(module, FSDPModule) and module is not top:
            continue
        seen.add(module)
        yield module
        left += reversed(list(module.children()))
