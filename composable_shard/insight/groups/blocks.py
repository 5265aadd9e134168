"""Which modules of a model are repeated: those that are best sharded one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn


def repeated_blocks(model: nn.Module) -> set[nn.Module]:
    """Return the outermost modules that stand several times in a list, with parameters.

    >>> model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    >>> len(repeated_blocks(model))
    3
    """
    found: set[nn.Module] = set()
    _collect(model, found)
    return found


def is_repeated_block(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a policy for ``apply_fully_shard`` that picks them."""
    blocks = repeated_blocks(model)
    return lambda module: module in blocks


def _collect(module: nn.Module, found: set[nn.Module]) -> None:
    children = list(module.children())
    kinds = Counter(type(child) for child in children)
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in children:
        has_params = next(child.parameters(), None) is not None
        runs = type(child).forward is not nn.Module.forward
        if is_list and kinds[type(child)] > 1 and has_params and runs:
            found.add(child)
        else:
            _collect(child, found)
