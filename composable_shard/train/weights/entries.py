"""What a model keeps in a checkpoint: each tensor once, with all the names it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.passes.hooks import owner_of
from composable_shard.errors import ShardError

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Modules around modules, which the names in a checkpoint do not mention."""


@dataclass
class Entry:
    """A parameter or buffer.

    Attributes:
        names: Under which names the model has it, in the order of its modules; several if tied.
        tensor: The tensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it."""
        if isinstance(self.tensor, DTensor):
            return _torch.local_tensor(self.tensor)
        return self.tensor.detach()

    @property
    def plain(self) -> torch.Tensor | None:
        """The one plain tensor that ``local`` is or wraps; ``None`` if it is made of several."""
        local = self.local
        leaves = _torch.leaves(local)
        if len(leaves) != 1:
            return None
        (leaf,) = leaves
        return leaf if leaf.shape == local.shape and leaf.dtype == local.dtype else None

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return any(leaf.is_meta for leaf in _torch.leaves(self.local))

    def fact(self) -> str:
        """Describe what must be the same on all ranks."""
        tensor, names = self.tensor, " = ".join(f"'{name}'" for name in self.names)
        kind = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
        place = ", on meta" if self.is_meta else ""
        return f"{names} of shape {list(tensor.shape)}, {tensor.dtype}{kind}{place}"


class Contents(NamedTuple):
    """The tensors of a model.

    Attributes:
        entries: Its parameters and persistent buffers.
        left_on_meta: Names of the buffers that no checkpoint has and that have no values yet.
    """

    entries: list[Entry]
    left_on_meta: list[str]


def contents_of(module: nn.Module, doing: str) -> Contents:
    """List the tensors of a model, those of sharded modules as shards.

    Args:
        module: The model.
        doing: The function that was called, for messages.

    Raises:
        TypeError: If it is not a module.
        ShardError: If a forward or backward of it runs.

    Collective: none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected model to be an nn.Module, got {type(module).__name__}")
    _show_shards(module, doing)
    names: dict[object, list[str]] = {}
    tensors: dict[object, torch.Tensor] = {}
    left_on_meta: list[str] = []
    for name, tensor, is_persistent in _registered(module):
        if is_persistent:
            key = _identity(tensor)
            names.setdefault(key, []).append(name)
            tensors.setdefault(key, tensor)
        elif tensor.is_meta:
            left_on_meta.append(name)
    return Contents([Entry(tuple(names[key]), tensors[key]) for key in tensors], left_on_meta)


def _show_shards(module: nn.Module, doing: str) -> None:
    """Register the shards of all groups that have parameters in the module."""
    groups = {group: None for inner in module.modules() if (group := owner_of(inner)) is not None}
    for group in groups:
        if group.context.forward.is_running or _torch.current_backward() != -1:
            raise ShardError(
                f"Expected {doing}() outside of forward and backward, got it within one of "
                f"{group.label}; call it between iterations"
            )
        if group in group.context.opened:
            raise ShardError(
                f"Expected {doing}() outside of unsharded(), got it within one of {group.label}; "
                "call it before or after"
            )
    for group in groups:
        group.reshard()


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield names, tensors and whether a checkpoint has them; tied ones under each name."""
    for path, inner in module.named_modules(remove_duplicate=False):
        steps = [step for step in path.split(".") if step and step not in WRAPPERS]
        volatile = _torch.non_persistent_buffers(inner)
        for attribute, param in inner._parameters.items():
            if param is not None:
                yield ".".join([*steps, attribute]), param, True
        for attribute, buffer in inner._buffers.items():
            if buffer is not None:
                yield ".".join([*steps, attribute]), buffer, attribute not in volatile


def _identity(tensor: torch.Tensor) -> object:
    """Return what tells a tensor from others: where it lies, as two may be one in memory."""
    if isinstance(tensor, DTensor) or tensor.is_meta or _torch.is_wrapper_subclass(tensor):
        return id(tensor)
    if not tensor.numel() or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
