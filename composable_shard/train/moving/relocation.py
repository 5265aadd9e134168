"""Moving one group and its parameters to other ranks: the part of `move` that knows the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.core.features.grad_extension import forget_codec
from composable_shard.core.group import ParamGroup
from composable_shard.core.placement import ParamPlacement, plan_placement, plan_tensor
from composable_shard.core.reduction import is_partial
from composable_shard.core.shard import build_buckets
from composable_shard.core.storage import ShardedParam, Storage
from composable_shard.mesh import ShardMesh


def plan(param: ShardedParam, mesh: ShardMesh) -> ParamPlacement:
    """Plan how a parameter lies over other ranks; those that split the model stay the same.

    Raises:
        ValueError: If it cannot be cut so.
    """
    whole, model = _whole_on_meta(param), param.placement.model
    if model is None:
        return plan_placement(param.name, whole, param.layout.dim, mesh)
    beside = mesh.full_mesh
    if beside is None:
        beside = _torch.axes_beside(mesh.mesh, model.mesh)
    meta = model.tensor_meta
    assert meta is not None
    whole = _torch.from_local(whole, _torch.make_spec(beside, model.placements, meta))
    planned = plan_placement(param.name, whole, param.layout.dim, mesh)
    before, after = _model_ranks(param.placement), _model_ranks(planned)
    if before != after:
        raise ValueError(
            f"Expected the tensor-parallel ranks {before} of parameter '{param.name}' to stay "
            f"together, got a mesh with {after} in their place"
        )
    # Modules that were parallelized know the mesh that they have.
    return planned if mesh.full_mesh is not None else replace(planned, model=model)


def _whole_on_meta(param: ShardedParam) -> torch.Tensor:
    """Return a tensor like what the ranks of a parameter hold together, without memory."""
    return param.layout.whole(torch.empty(param.layout.param.numel, device="meta"))


def _model_ranks(placement: ParamPlacement) -> list[list[int]]:
    """Return, for each axis that splits the model, the ranks that this one has there."""
    axes = [axis for axis, role in enumerate(placement.roles) if role is None]
    return [dist.get_process_group_ranks(placement.mesh.get_group(axis)) for axis in axes]


def local_shard_on_meta(param: ShardedParam) -> torch.Tensor:
    """Return a tensor like this rank's shard of a parameter, without memory."""
    rank = param.mesh.shard_rank
    flat = torch.empty(param.layout.param.local_numel(rank), device="meta")
    return param.layout.local(flat, rank)


def has_unsynced_grad(group: ParamGroup, param: ShardedParam) -> bool:
    """Return whether a gradient was accumulated without sync, on this rank or another one."""
    return param.name in group.unsynced_names or is_partial(param.sharded.grad)


def replan(param: ShardedParam, mesh: ShardMesh, placement: ParamPlacement) -> None:
    """Take over what :func:`plan` has planned; the sharded parameter is left as it is."""
    param.layout = plan_tensor(_whole_on_meta(param), param.layout.dim, mesh.num_shards)
    param.mesh, param.placement, param.place = mesh, placement, None
    param.device = torch.device("cpu") if param.offload is not None else mesh.device
    param.forget_unsharded()


def build(
    params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]
) -> tuple[list[Storage], list[torch.Tensor]]:
    """Copy shards into new buckets; return these, and where each shard lies there."""
    buckets = build_buckets(params, shards)
    places = {
        id(param): local
        for bucket in buckets
        for param, local in zip(bucket.params, bucket.locals, strict=True)
    }
    return buckets, [places[id(param)] for param in params]


def settle_param(param: ShardedParam, local: torch.Tensor) -> None:
    """Let the sharded parameter lie as planned, with ``local`` as this rank's shard."""
    spec = _torch.spec_with_dtype(param.sharded_spec, local.dtype)
    if any(leaf.is_meta for leaf in _torch.leaves(_torch.local_tensor(param.sharded))):
        # It gets memory, and stays the object that it is.
        made = _torch.from_local(local, spec)
        exchange(param.sharded, _torch.parameter_of(made, param.sharded.requires_grad))
    _torch.relocate(param.sharded, local, spec)
    param.hold(local)
    forget_codec(param)


def leave_param(param: ShardedParam, nothing: torch.Tensor, spec: _torch.DTensorSpec) -> None:
    """Let a parameter lie on other ranks alone, described by ``spec``."""
    param.sharded.grad = None
    param.forget_unsharded()
    _torch.relocate(param.sharded, nothing, spec)
    param.local, param.place = nothing, None


def exchange(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let a parameter become another one, with its own hooks and attributes."""
    _torch.share_hooks(old, new)
    new.__dict__.update(old.__dict__)
    torch.utils.swap_tensors(old, new)
