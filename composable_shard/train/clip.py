"""Clipping gradients by their norm, whatever meshes they lie on.

The p-norm of a tensor is the p-norm of the norms of its parts. Each rank takes the norms of what it
holds; those of sharded gradients are then gathered over the axes they are sharded on, and over no
other, so that what is replicated counts once. Gathering and reducing in rank order, instead of
summing on the way, gives all ranks the same bits, in every replica, and knows NaN and every p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import islice
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from composable_shard import _torch
from composable_shard.arguments import (
    check_flags,
    check_type,
    check_value,
    checked_list,
    checked_number,
)
from composable_shard.core.hooks import owner_of
from composable_shard.core.storage import sharded_form
from composable_shard.core.ties import owner_of_sharded
from composable_shard.core.transport.failures import announce, watched
from composable_shard.errors import ShardError
from composable_shard.train.full import sharded_axes

# What clipping and unscaling ask of a gradient ----------------------------------------------------

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


# The norm of gradients that lie on any mix of meshes, and scaling them by it ----------------------

_DOING = "taking the norm of gradients"
_NUM_NAMED = 3  # parameters whose gradients are not finite


class _Norms:
    """Norms of parts of one long vector, by the process groups they are still to be taken over.

    With ``p = 0`` torch counts the gradients that are not all zero, so norms are kept apart then.
    """

    def __init__(self, p: float, dtype: torch.dtype, device: torch.device) -> None:
        self._p, self._dtype, self._device = p, dtype, device
        self._parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}

    def add(self, grads: Sequence[torch.Tensor]) -> None:
        """Take the norms of this rank's parts of ``grads``. Collective: none."""
        known: dict[object, tuple[dist.ProcessGroup, ...]] = {}
        for grad, norm in zip(grads, self._local_norms(grads), strict=True):
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            if key not in known:
                known[key] = _groups_of(grad)
            self._parts.setdefault(known[key], []).append(norm)

    def total(self) -> torch.Tensor:
        """Return the norm of everything, a scalar. Collective: an all-gather for each axis."""
        found: list[torch.Tensor] = []
        for groups, norms in self._parts.items():
            own = torch.stack(norms)  # [norms], or [1]
            if self._p != 0:
                own = torch.linalg.vector_norm(own, self._p, dim=0, keepdim=True)
            for group in groups:
                message = own.to(_torch.device_for(group, self._device))
                gathered = _torch.empty(  # [ranks, norms]
                    group.size(), len(message), dtype=message.dtype, device=message.device
                )
                with watched(group, _DOING):
                    _torch.all_gather_rows(gathered, message, group)
                own = torch.linalg.vector_norm(gathered, self._p, dim=0).to(self._device)
            found.append(own)
        return torch.linalg.vector_norm(torch.cat(found), self._p)

    def alone(self, param: torch.Tensor) -> torch.Tensor:
        """Return the norm of the gradient of one parameter. Collective: see :meth:`total`."""
        norms = _Norms(self._p, self._dtype, self._device)
        grad = cast(torch.Tensor, param.grad)
        norms.add([_reduced(param) if pending(grad) else grad])
        return norms.total()

    def _local_norms(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Take the norm of each local part; of one without elements, what changes no norm."""
        locals_ = list(map(_torch.local_part, grads))
        norms: dict[int, torch.Tensor] = {}
        for some in alike([local for local in locals_ if local.numel()]).values():
            norms.update(zip(map(id, some), self._norms_of(some), strict=True))
        unchanging = 0.0 if self._p >= 0 else math.inf
        for local in locals_:
            if id(local) not in norms:
                norms[id(local)] = torch.full((), unchanging, device=self._device)
        return [norms[id(local)].to(self._dtype) for local in locals_]

    def _norms_of(self, parts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Take the norms of tensors of one device, dtype and kind."""
        dtype = parts[0].dtype
        # Half precision overflows where the norm of a big model lies.
        wide = self._dtype if dtype.is_floating_point and dtype.itemsize < 4 else None
        if type(parts[0]) is torch.Tensor:
            norms = _torch.norms_of_all(parts, self._p, wide)
        else:
            norms = [torch.linalg.vector_norm(part, self._p, dtype=wide) for part in parts]
        if _torch.is_wrapper_subclass(norms[0]):
            raise TypeError(
                f"Expected gradients whose norm is a plain tensor, got {type(parts[0]).__name__}, "
                f"whose norm is a {type(norms[0]).__name__}; clip its inner tensors by themselves"
            )
        return torch.stack(norms).to(self._device).unbind()


# One gradient ---------------------------------------------------------------------------------


def _groups_of(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of the axes over which each rank has another part."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(
            "Expected this rank to be on the mesh of every gradient, got rank "
            f"{dist.get_rank()} and {mesh}; leave its parameter out on this rank"
        )
    return tuple(map(mesh.get_group, sharded_axes(mesh, grad.placements)))


def _name_of(param: torch.Tensor) -> str:
    owner = owner_of_sharded(param) if isinstance(param, nn.Parameter) else None
    group = None if owner is None else owner_of(owner.slots[0].module)
    if owner is None or group is None:
        return f"a parameter of shape {list(param.shape)}"
    return f"'{owner.name}' of {group.label}"


def _check_local_shape(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Raise ``ShardError`` if a gradient is laid out as its parameter and has another local shape.

    Collective: none; it is announced to the ranks that wait for this one.
    """
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)):
        return
    own, got = (list(_torch.local_tensor(tensor).shape) for tensor in (param, grad))
    if own == got or (param.device_mesh, param.placements) != (grad.device_mesh, grad.placements):
        return
    error = ShardError(
        f"Expected a gradient of local shape {own} for {_name_of(param)}, got {got}; assign what "
        "has the rows of this rank, such as distribute_tensor returns"
    )
    announce(map(param.device_mesh.get_group, range(param.device_mesh.ndim)), _DOING, error)
    raise error


def _first_not_finite(params: Sequence[torch.Tensor], norms: _Norms) -> list[str]:
    """Name the first parameters whose gradients are not finite. Collective: see _Norms.total."""
    found = (_name_of(param) for param in params if not norms.alone(param).isfinite())
    return list(islice(found, _NUM_NAMED))


def _reduced(param: torch.Tensor) -> DTensor:
    """Return what a gradient stands for whose reduction is pending.

    Collective: a reduce-scatter or all-reduce of it; all ranks must have it.
    """
    grad = cast(DTensor, param.grad)
    placements = [Replicate() if p.is_partial() else p for p in grad.placements]
    own = param.placements[0] if isinstance(param, DTensor) else None
    if len(placements) == 1 and type(own) is Shard:
        placements = [own]
    return grad.redistribute(placements=placements)


def _communication_device(grads: Sequence[torch.Tensor]) -> torch.device:
    """Return where norms come together: on the device of a mesh, wherever gradients are kept."""
    for grad in grads:
        if isinstance(grad, DTensor):
            return torch.device(grad.device_mesh.device_type)
    return grads[0].device


# Clipping gradients by their norm -----------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | Literal["inf"] = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    The norm is that of the whole model, as if its gradients were one vector, whatever meshes they
    lie on: what is sharded is taken over the ranks, what is replicated counts once. Plain gradients
    are taken to be the same on all ranks. Gradients whose reduction is still pending (``Partial``,
    accumulated without sync) count as what they stand for, which costs reducing each of them once;
    all ranks must have the same ones then.

    Args:
        parameters: Parameters, or a single one; those without a gradient are passed over.
        max_norm: The norm to scale down to; smaller gradients stay as they are.
        norm_type: Order of the norm; ``float("inf")``, or ``"inf"``, for the largest absolute
            value. 0 counts the gradients that are not all zero, as in torch.
        error_if_nonfinite: Whether to raise if the norm is infinite or NaN, before anything is
            scaled; reads the norm on the host.
        foreach: As in torch. Gradients of one device and dtype are always treated together, so it
            changes nothing.

    Returns:
        The norm before, a scalar tensor of the dtype of the gradients, bitwise the same on all
        ranks; 0 if there are no gradients. It is taken in float32 at least, so that half
        precision overflows in the result at most.

    Raises:
        ShardError: On all ranks, if the norm is not finite and ``error_if_nonfinite``; it names the
            first parameters with such gradients. If a gradient has the local shape of another rank.
        ValueError: If ``max_norm`` is negative or NaN, or a flag no bool. If a gradient is
            ``Partial`` with a reduction that cannot be scaled (product), or this rank is not on the
            mesh of one.
        TypeError: If ``parameters`` are no tensors, or a number is none. If a gradient is a tensor
            subclass whose norm is not a plain tensor.

    Collective: for each combination of mesh axes on which gradients are sharded, one all-gather of
        a scalar for each of the axes; a reduction of each ``Partial`` gradient.
    Memory: a few scalars; one reduced gradient at a time where some are ``Partial``.
    Source: ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> from torch import nn
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def step():
        ...     layer = nn.Linear(2, 2, bias=False)
        ...     nn.init.ones_(layer.weight)
        ...     fully_shard(layer)
        ...     layer(torch.ones(1, 2)).sum().backward()
        ...     norm = clip_grad_norm_(layer.parameters(), max_norm=1.0)
        ...     return norm, layer.weight.grad.to_local()
        >>> run_threads(step, 2)
        [(tensor(2.0000), tensor([[0.5000, 0.5000]])), (tensor(2.0000), tensor([[0.5000, 0.5000]]))]
    """
    remedy = "pass its parameters()"
    params = (
        [parameters]
        if isinstance(parameters, torch.Tensor)
        else checked_list("parameters", parameters, "tensors", remedy)
    )
    for param in params:
        check_type("parameters", param, isinstance(param, torch.Tensor), "tensors", remedy)
    limit = checked_number("max_norm", max_norm)
    check_value("max_norm", max_norm, limit >= 0, "of at least 0")
    order = math.inf if norm_type == "inf" else checked_number("norm_type", norm_type)
    check_flags(error_if_nonfinite=error_if_nonfinite, foreach=foreach is not None and foreach)
    owners = [param for param in map(sharded_form, params) if param.grad is not None]
    if not owners:
        return torch.tensor(0.0)
    grads = [cast(torch.Tensor, param.grad) for param in owners]
    check_scalable(grads, "clipping")
    for param, grad in zip(owners, grads, strict=True):
        _check_local_shape(param, grad)
    dtype = reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads))
    norms = _Norms(order, torch.promote_types(dtype, torch.float32), _communication_device(grads))
    norms.add([grad for grad in grads if not pending(grad)])
    for param in owners:
        if pending(cast(torch.Tensor, param.grad)):
            norms.add([_reduced(param)])
    total = norms.total()
    if error_if_nonfinite and not total.isfinite():
        names = _first_not_finite(owners, norms)
        among = f", because of the gradients of {', '.join(names)}" if names else ""
        raise ShardError(
            f"Expected gradients of a finite norm of order {order}, got {total.item()}{among}; "
            "set error_if_nonfinite=False to scale them by it all the same"
        )
    coefficient = torch.clamp(limit / (total + 1e-6), max=1.0)
    for (device, _, kind), locals_ in alike(list(map(_torch.local_part, grads))).items():
        own = coefficient.to(device)
        if kind is torch.Tensor:
            _torch.multiply_all_(locals_, own)
        else:
            for local in locals_:
                local.mul_(own)
    return total.to(grads[0].device, dtype)
