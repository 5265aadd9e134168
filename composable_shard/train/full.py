"""One tensor of which ranks hold parts, as a whole; and whether two hold the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from composable_shard import _torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of a DTensor in memory of their own, on the device of compute."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh, placements, local = tensor.device_mesh, tensor.placements, _torch.local_tensor(tensor)
    whole = cast(DTensor, tensor.detach())
    if local.device.type != mesh.device_type:
        whole = distributed(local.detach().to(mesh.device_type), tensor, placements)
    full = whole.full_tensor()
    is_local = all(p.is_replicate() or mesh.size(axis) == 1 for axis, p in enumerate(placements))
    # The inner tensors of a subclass may still be under way: copying waits for them.
    return full.clone() if is_local or _torch.is_wrapper_subclass(full) else full


def distributed(local: torch.Tensor, like: DTensor, placements: Sequence[Any]) -> DTensor:
    """Make a local tensor a DTensor of the shape and mesh of another. Collective: none."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype hold the same, also for NaN and -0."""
    pairs = zip(_torch.leaves(one), _torch.leaves(other), strict=True)
    return all(torch.equal(_bits(mine), _bits(theirs)) for mine, theirs in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize]) if tensor.is_floating_point() else tensor
