"""Trainable parameters that nobody shards: ignored ones, and those that were added too late."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor

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


def warn_of_plain(modules: Iterable[nn.Module], ours: Iterable[nn.Parameter | None]) -> None:
    """Warn if trainable parameters of ``modules`` are plain and were not ignored.

    Args:
        modules: Modules that are sharded.
        ours: Plain parameters that belong there.
    """
    known = set(map(id, ours))
    names = [
        f"{prefix}.{name}".lstrip(".")
        for top in modules
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
            "fully_shard, which each rank trains by itself; add them before it, or pass them as "
            "ignored_params if their gradients are averaged elsewhere",
            stacklevel=2,
        )
