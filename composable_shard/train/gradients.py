"""What clipping and unscaling ask of a gradient that this rank has a part of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement

_LINEAR = ("sum", "avg", "max", "min")
"""What a pending reduction may be for its parts to be scaled in place of its result."""


def pending(grad: torch.Tensor) -> list[tuple[int, Placement]]:
    """Return the mesh axes over which a gradient is still to be reduced, with their placements."""
    if not isinstance(grad, DTensor):
        return []
    return [(axis, p) for axis, p in enumerate(grad.placements) if p.is_partial()]


def check_scalable(grads: Iterable[torch.Tensor], doing: str) -> None:
    """Raise ``ValueError`` if scaling the parts of a pending gradient does not scale its result."""
    for grad in grads:
        for _, placement in pending(grad):
            if isinstance(placement, Partial) and placement.reduce_op not in _LINEAR:
                raise ValueError(
                    f"Expected gradients that are pending as one of {_LINEAR}, got {placement}; "
                    f"redistribute them before {doing}"
                )


def alike(
    tensors: Sequence[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype, type], list[torch.Tensor]]:
    """Sort tensors by what one kernel can do: device, dtype, and kind."""
    found: dict[tuple[torch.device, torch.dtype, type], list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device, tensor.dtype, type(tensor))
        found.setdefault(key, []).append(tensor)
    return found
