"""Memory for tensors that a model was built without, on the meta device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.passes.hooks import owner_of
from composable_shard.train.weights.entries import Entry


def materialize(module: nn.Module, entries: Iterable[Entry]) -> None:
    """Give memory, without values, to what is on the meta device; parameters stay the same objects.

    Sharded parameters get it where they belong, offloaded ones on the CPU; everything else where
    the model computes.

    Args:
        module: The model.
        entries: What of it.
    """
    groups = {group: None for m in module.modules() if (group := owner_of(m)) is not None}
    params = [param for group in groups for param in group.params]
    homes = {id(param.sharded): param.device for param in params}
    computing = [param.mesh.device for param in params]
    computing += [p.device for p in module.parameters() if not p.is_meta]
    anywhere = computing[0] if computing else torch.get_default_device()
    for entry in entries:
        if not entry.is_meta:
            continue
        old = entry.tensor
        device = homes.get(id(old), anywhere)
        if id(old) not in homes and isinstance(old, DTensor):
            device = torch.device(old.device_mesh.device_type)
        new = _torch.without_values(torch.empty_like(old, device=device, requires_grad=False))
        if isinstance(old, nn.Parameter):
            _exchange(old, nn.Parameter(new, requires_grad=old.requires_grad))
        else:
            _replace(module, old, new)
            entry.tensor = new


def _exchange(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give a parameter the memory of another one; it stays the object that optimizers hold."""
    _torch.share_hooks(old, new)
    new.__dict__.update(old.__dict__)
    torch.utils.swap_tensors(old, new)


def _replace(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Register another buffer wherever one is; views of it may exist, so it is not exchanged."""
    for inner in module.modules():
        for attribute, buffer in inner._buffers.items():
            if buffer is old:
                inner._buffers[attribute] = new
