"""Trainable parameters that nobody shards: ignored ones, and those that were added too late."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor

_ignored: set[int] = set()


def ignore(params: Iterable[nn.Parameter]) -> None:
    """Note that users know of parameters that stay plain."""
    for param in params:
        if id(param) not in _ignored:
            _ignored.add(id(param))
            weakref.finalize(param, _ignored.discard, id(param))


def warn_of_plain(modules: Iterable[nn.Module], ours: Iterable[nn.Parameter | None]) -> None:
    """Warn if trainable parameters of ``modules`` are plain and were not ignored.

    Args:
        modules: Modules that are sharded.
        ours: Plain parameters that belong there.
    """
    known = {*_ignored, *map(id, ours)}
    names = [
        name
        for module in modules
        for name, param in module.named_parameters()
        if param.requires_grad and not isinstance(param, DTensor) and id(param) not in known
    ]
    if names:
        warnings.warn(
            f"Expected all trainable parameters to be sharded or ignored, got {names}, added after "
            "fully_shard, which each rank trains by itself; add them before it, or pass them as "
            "ignored_params if their gradients are averaged elsewhere",
            stacklevel=2,
        )
