"""Trainable parameters that we do not shard.

Some are ignored, some belong to modules that torch's ``replicate`` keeps whole on every rank, and
some were added too late.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.errors import ShardError

_ATTRIBUTE = "_composable_shard_ignored"


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
