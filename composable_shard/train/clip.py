"""Clipping gradients by their norm, on any mix of meshes.

The p-norm of a tensor is the p-norm of the norms of its parts. Each rank computes the norms of its
local parts. The norms of sharded gradients are then gathered over the sharded axes only, so that
replicated gradients count once. Gathering and then reducing in rank order, instead of an
all-reduce, gives all ranks and replicas the same bits, and handles NaN and every p.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial, reduce
from itertools import chain, islice
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from composable_shard import _torch, arguments
from composable_shard.core.optimizers import reduce_before_step
from composable_shard.core.storage import as_sharded, owner_of_sharded
from composable_shard.core.transport.failures import announce, watched
from composable_shard.errors import ShardError
from composable_shard.train.full import sharded_axes

# Gradients that can be scaled ---------------------------------------------------------------------

_LINEAR = ("sum", "avg", "max", "min")  # pending reductions that commute with scaling


def pending(grad: torch.Tensor | None) -> list[tuple[int, Placement]]:
    """Return the mesh axes over which a gradient is not yet reduced, with their placements."""
    if not isinstance(grad, DTensor):
        return []
    return [(axis, p) for axis, p in enumerate(grad.placements) if p.is_partial()]


def check_scalable(grads: Iterable[torch.Tensor]) -> None:
    """Raise ``ValueError`` if scaling the parts of a pending gradient does not scale its result."""
    for placement in (placement for grad in grads for _, placement in pending(grad)):
        if isinstance(placement, Partial) and placement.reduce_op not in _LINEAR:
            raise ValueError(
                f"Expected pending gradients of {_LINEAR}, got {placement}; redistribute them first"
            )


def alike(tensors: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Group tensors that one kernel can process: by device, dtype, and class."""
    found = defaultdict[Any, list[torch.Tensor]](list)
    for tensor in tensors:
        found[tensor.device, tensor.dtype, type(tensor)].append(tensor)
    return found


# The norm of gradients that lie on any mix of meshes, and scaling them by it ----------------------

_DOING = "taking the norm of gradients"


def _norm_of(
    batches: Iterable[Sequence[torch.Tensor]], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the norm of all gradients together, a scalar of ``dtype`` on ``device``.

    With ``p = 0`` torch counts the gradients that are not all zero, so norms stay separate then.

    Args:
        batches: Batches of gradients; each batch may be freed before the next is read.
        p: The order of the norm.
        dtype: The dtype of the norms.
        device: The device of the norms.

    Collective: an all-gather for each axis over which gradients are sharded.
    """
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    groups_of = cache(_groups_of)
    for grads in batches:
        keys = [
            groups_of(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else ()
            for grad in grads
        ]
        for key, norm in zip(keys, _local_norms(grads, p, dtype, device), strict=True):
            parts.setdefault(key, []).append(norm)
        del grads
    found: list[torch.Tensor] = []
    for groups, norms in parts.items():
        norm = torch.stack(norms)  # [norms], or [1]
        if p != 0:
            norm = torch.linalg.vector_norm(norm, p, dim=0, keepdim=True)
        for group in groups:
            message = norm.to(_torch.device_for(group, device))
            # [ranks, norms]
            gathered = _torch.empty(group.size(), len(message), dtype=dtype, device=message.device)
            with watched(group, _DOING):
                _torch.all_gather_rows(gathered, message, group)
            norm = torch.linalg.vector_norm(gathered, p, dim=0).to(device)
        found.append(norm)
    return torch.linalg.vector_norm(torch.cat(found), p)


def _local_norms(
    grads: Sequence[torch.Tensor], p: float, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return the norm of each local part; for an empty part, a value that changes no norm."""
    locals_ = list(map(_torch.local_part, grads))
    norms: dict[int, torch.Tensor] = {}
    for (_, of_dtype, kind), some in alike(part for part in locals_ if part.numel()).items():
        # Half precision overflows where the norm of a big model lies.
        wide = dtype if of_dtype.is_floating_point and of_dtype.itemsize < 4 else None
        if kind is torch.Tensor:
            found = _torch.norms_of_all(some, p, wide)
        else:
            found = [torch.linalg.vector_norm(part, p, dtype=wide) for part in some]
        if _torch.is_wrapper_subclass(found[0]):
            raise TypeError(
                f"Expected gradients with a plain norm, got {kind.__name__}; clip its inner tensors"
            )
        stacked = torch.stack(list(found)).to(device).to(dtype)
        norms.update(zip(map(id, some), stacked.unbind(), strict=True))
    unchanging = torch.full((), 0.0 if p >= 0 else math.inf, dtype=dtype, device=device)
    return [norms.get(id(local), unchanging) for local in locals_]


# One gradient ---------------------------------------------------------------------------------


def _groups_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of the axes over which a gradient is sharded."""
    if mesh.get_coordinate() is None:
        rank = dist.get_rank()
        raise ValueError(f"Expected gradients on rank {rank}, got one on {mesh}; omit that one")
    return tuple(map(mesh.get_group, sharded_axes(mesh, placements)))


def _name_of(param: torch.Tensor) -> str:
    owner = owner_of_sharded(param)
    if owner is None:
        return f"a parameter of shape {list(param.shape)}"
    return f"'{owner.name}' of {owner.group.label}"


def _check_local_shape(param: torch.Tensor) -> None:
    """Raise ``ShardError`` if a gradient has its parameter's placements but another local shape.

    Collective: none; the error is sent to the ranks that wait for this rank.
    """
    grad = param.grad
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)):
        return
    own, got = (list(_torch.local_tensor(tensor).shape) for tensor in (param, grad))
    if own == got or (param.device_mesh, param.placements) != (grad.device_mesh, grad.placements):
        return
    error = ShardError(
        f"Expected a gradient of local shape {own} for {_name_of(param)}, got {got}; assign the "
        "rows of this rank, such as the result of distribute_tensor"
    )
    announce(map(param.device_mesh.get_group, range(param.device_mesh.ndim)), _DOING, error)
    raise error


def _reduced(param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter; if it is pending, its reduced value.

    Collective: a reduce-scatter or all-reduce of a pending gradient; all ranks must have it.
    """
    grad = cast(torch.Tensor, param.grad)
    if not isinstance(grad, DTensor) or not pending(grad):
        return grad
    placements = [Replicate() if p.is_partial() else p for p in grad.placements]
    placement = param.placements[0] if isinstance(param, DTensor) else None
    if len(placements) == 1 and type(placement) is Shard:
        placements = [placement]
    return grad.redistribute(placements=placements)


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

    The norm is that of the whole model, as if its gradients were one vector, on any mix of meshes:
    shards of all ranks count, and replicated gradients count once. Plain gradients must be the same
    on all ranks. Pending gradients (``Partial``, accumulated without sync) count with their reduced
    values, which costs one reduction of each; all ranks must then have the same pending gradients.

    Args:
        parameters: Parameters, or a single one; parameters without a gradient are skipped.
        max_norm: The largest norm after scaling; smaller gradients are not scaled.
        norm_type: Order of the norm; ``float("inf")``, or ``"inf"``, for the largest absolute
            value. 0 counts the gradients that are not all zero, as in torch.
        error_if_nonfinite: Whether to raise if the norm is infinite or NaN, before anything is
            scaled; reads the norm on the host.
        foreach: Accepted as in torch, without effect: gradients of one device and dtype are always
            scaled together.

    Returns:
        The norm before scaling, a scalar tensor of the dtype of the gradients, bitwise the same on
        all ranks; 0 if there are no gradients. It is computed in float32 or wider, so half
        precision can overflow only in the result.

    Raises:
        ShardError: On all ranks, if the norm is not finite and ``error_if_nonfinite``; it names the
            first parameters with such gradients. If a gradient has the local shape of another rank.
        ValueError: If ``max_norm`` is negative or NaN, or a flag is no bool; if a gradient is
            ``Partial`` with a reduction that cannot be scaled (product), or on a mesh without this
            rank.
        TypeError: If ``parameters`` are no tensors, or a number argument is no number; if the norm
            of a gradient is not a plain tensor.

    Collective: for each combination of mesh axes on which gradients are sharded, one all-gather of
        a scalar for each of the axes; a reduction of each ``Partial`` gradient.
    Memory: a few scalars; one reduced gradient at a time if some are ``Partial``.
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
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    params = arguments.checked_list("parameters", given, "tensors", remedy)
    for param in params:
        is_tensor = isinstance(param, torch.Tensor)
        arguments.check_type("parameters", param, is_tensor, "tensors", remedy)
    limit = arguments.checked_number("max_norm", max_norm)
    arguments.check_value("max_norm", max_norm, limit >= 0, "of at least 0")
    order = math.inf if norm_type == "inf" else arguments.checked_number("norm_type", norm_type)
    arguments.check_flags(error_if_nonfinite=error_if_nonfinite, foreach=foreach or False)
    reduce_before_step(map(as_sharded, params))
    owners = [param for param in map(as_sharded, params) if param.grad is not None]
    if not owners:
        return torch.tensor(0.0)
    grads = [cast(torch.Tensor, param.grad) for param in owners]
    check_scalable(grads)
    for param in owners:
        _check_local_shape(param)
    dtype = reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads))
    meshes = [grad.device_mesh for grad in grads if isinstance(grad, DTensor)]
    device = torch.device(meshes[0].device_type) if meshes else grads[0].device
    wide = torch.promote_types(dtype, torch.float32)
    norm_of = partial(_norm_of, p=order, dtype=wide, device=device)
    reduced = [grad for grad in grads if not pending(grad)]
    total = norm_of(chain([reduced], ([_reduced(p)] for p in owners if pending(p.grad))))
    if error_if_nonfinite and not total.isfinite():
        wrong = (param for param in owners if not norm_of([[_reduced(param)]]).isfinite())
        names = list(map(_name_of, islice(wrong, 3)))
        among = f", because of the gradients of {', '.join(names)}" if names else ""
        raise ShardError(
            f"Expected gradients of a finite norm of order {order}, got {total.item()}{among}; "
            "set error_if_nonfinite=False to scale them by it anyway"
        )
    coefficient = torch.clamp(limit / (total + 1e-6), max=1.0)
    for (device, _, kind), locals_ in alike(map(_torch.local_part, grads)).items():
        factor = coefficient.to(device)
        if kind is torch.Tensor:
            _torch.multiply_all_(locals_, factor)
        else:
            for local in locals_:
                local.mul_(factor)
    return total.to(grads[0].device, dtype)
