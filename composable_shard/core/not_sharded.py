"""Modules that ``fully_shard`` refuses, and trainable parameters that it leaves alone.

Some parameters are ignored, some belong to modules that torch's ``replicate`` keeps whole on every
rank, and some were added too late.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.errors import ShardError

_ATTRIBUTE = "_composable_shard_ignored"

GROUP = "_composable_shard_group"
"""The attribute of a sharded module that holds its group."""


def ignore(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> None:
    """Note that users know of parameters of ``modules`` that stay plain.

    Hazard: others take their places when they are loaded, moved or copied, and torch swaps no
    tensor to which there are weak references. Guard: what is noted is where they are.
    """
    ids = set(map(id, params))
    if not ids:
        return
    for module in modules:
        names = [name for name, param in module._parameters.items() if id(param) in ids]
        if names:
            module.__dict__[_ATTRIBUTE] = (*module.__dict__.get(_ATTRIBUTE, ()), *names)


def is_taken(module: nn.Module) -> bool:
    """Tell whether a function, ``fully_shard`` or ``replicate``, reduces a module's gradients.

    It may be torch's own ``fully_shard``.
    """
    return "fully_shard" in _torch.composable_functions(module) or _torch.is_replicated(module)


def top_modules(module: object) -> tuple[nn.Module, ...]:
    """Return the modules of the argument, without those that lie inside another of them.

    Raises:
        TypeError: If it is not a module or a list of modules.
        ValueError: If the list is empty, or a module is a container without a forward.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"Expected module to be an nn.Module or a list of them, got {type(module).__name__}"
        )
    if not modules:
        raise ValueError("Expected at least one module, got an empty list")
    for index, member in enumerate(modules):
        if not isinstance(member, nn.Module):
            raise TypeError(
                f"Expected a list of nn.Module, got {type(member).__name__} at index {index}"
            )
        if type(member).forward is nn.Module.forward and "forward" not in vars(member):
            raise ValueError(
                f"Expected a module with a forward, got the container {type(member).__name__}; "
                "call fully_shard on its children, or on a list of them"
            )
    inner = {id(m) for top in modules for m in top.modules() if m is not top}
    unique = {id(member): member for member in modules if id(member) not in inner}
    return tuple(unique.values())


def check_not_taken(modules: Iterable[nn.Module]) -> None:
    """Refuse modules whose gradients another call, or another function, reduces.

    Raises:
        ValueError: If ``fully_shard``, ours or torch's, or ``replicate`` has one, or if a function
            of torch has converted the parameters of a module around it.
    """
    for module in modules:
        kind = type(module).__name__
        if _torch.is_replicated(module):
            raise ValueError(
                f"Expected a module without torch's replicate or DistributedDataParallel, got "
                f"{kind}; leave that out, or apply fully_shard to modules inside of it, before it, "
                "or to one around it"
            )
        if is_taken(module):
            raise ValueError(
                f"Expected a module that is not sharded, got {kind}, which fully_shard was "
                "applied to before; shard what was added to it, such as new adapters, alone"
            )
        if not any(isinstance(param, DTensor) for param in module.parameters()):
            continue
        for outer in _torch.modules_with_state():
            is_of_torch = GROUP not in vars(outer) and is_taken(outer)
            if is_of_torch and any(module is inner for inner in outer.modules()):
                raise ValueError(
                    f"Expected fully_shard of {kind} before torch has converted the parameters "
                    f"of {type(outer).__name__} around it, got it after; start with the inner "
                    "modules"
                )


def refuse_replicated(
    tops: Iterable[nn.Module], holders: Collection[nn.Module], label: str
) -> None:
    """Raise if ``replicate`` was applied to a module after its parameters were sharded.

    Args:
        tops: The modules of a group.
        holders: The modules in which its parameters are registered.
        label: What messages call the group.

    Raises:
        ShardError: On all ranks, with the name of the module.
    """
    for top in tops:
        for name, module in top.named_modules():
            is_ours = module is not top and _torch.is_replicated(module)
            if is_ours and any(inner in holders for inner in module.modules()):
                raise ShardError(
                    f"Expected replicate of '{name}' before fully_shard of {label}, whose "
                    "parameters it holds, got it after; apply replicate first"
                )


def warn_of_plain(modules: Iterable[nn.Module], ours: Iterable[nn.Parameter | None]) -> None:
    """Warn if trainable parameters of ``modules`` are plain and were not ignored.

    Args:
        modules: Modules that are sharded.
        ours: Plain parameters that belong there.
    """
    tops = tuple(modules)
    replicated = {
        id(param)
        for top in tops
        for module in top.modules()
        if _torch.is_replicated(module)
        for param in module.parameters()
    }
    known = replicated.union(map(id, ours))
    names = [
        f"{prefix}.{name}".lstrip(".")
        for top in tops
        for prefix, module in top.named_modules()
        for name, param in module._parameters.items()
        if param is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and id(param) not in known
        and name not in module.__dict__.get(_ATTRIBUTE, ())
    ]
    if names:
        warnings.warn(
            f"Expected all trainable parameters to be sharded or ignored, got {names}, added after "
            "fully_shard, which each rank trains by itself; add them before it, shard new "
            "adapters of a sharded base alone, or pass them as ignored_params if their gradients "
            "are averaged elsewhere",
            stacklevel=2,
        )
