"""Moving one group and its parameters to other ranks: the part of `move` that knows the core."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.core.gradient import is_partial
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.core.placement import ParamPlacement, plan_dense, plan_placement
from composable_shard.core.units import build_units
from composable_shard.mesh import ShardMesh

build = build_units
"""Copies shards into new buckets; returns these, and where each shard lies there."""


def plan(param: ShardedParam, mesh: ShardMesh) -> ParamPlacement:
    """Plan how a parameter lies over other ranks; those that split the model stay the same.

    Raises:
        ValueError: If it cannot be cut so.
    """
    whole, model = _whole_on_meta(param), param.placement.model
    if model is None:
        return plan_placement(param.name, whole, param.form.dim, mesh)
    beside = mesh.full_mesh
    if beside is None:
        beside = _torch.axes_beside(mesh.mesh, model.mesh)
    meta = model.tensor_meta
    assert meta is not None
    whole = _torch.from_local(whole, _torch.make_spec(beside, model.placements, meta))
    planned = plan_placement(param.name, whole, param.form.dim, mesh)
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
    return param.form.whole(torch.empty(param.form.layout.numel, device="meta"))


def _model_ranks(placement: ParamPlacement) -> list[list[int]]:
    """Return, for each axis that splits the model, the ranks that this one has there."""
    axes = [axis for axis, role in enumerate(placement.roles) if role is None]
    return [dist.get_process_group_ranks(placement.mesh.get_group(axis)) for axis in axes]


def local_shard_on_meta(param: ShardedParam) -> torch.Tensor:
    """Return a tensor like this rank's shard of a parameter, without memory."""
    rank = param.mesh.shard_rank
    flat = torch.empty(param.form.layout.local_numel(rank), device="meta")
    return param.form.local(flat, rank)


def has_unsynced_grad(_: ParamGroup, param: ShardedParam) -> bool:
    """Return whether a gradient was accumulated without sync, on this rank or another one."""
    return param.is_unsynced or is_partial(param.sharded.grad)


def replan(param: ShardedParam, mesh: ShardMesh, placement: ParamPlacement) -> None:
    """Take over what :func:`plan` has planned; the sharded parameter is left as it is."""
    meta = param.spec.tensor_meta
    assert meta is not None
    param.form = plan_dense(_whole_on_meta(param), param.form.dim, mesh.num_shards)
    param.mesh, param.placement = mesh, placement
    param.spec = _torch.make_spec(placement.mesh, placement.sharded, meta)
    param.device = torch.device("cpu") if param.offload is not None else mesh.device
    param.specs, param.place, param.shares_storage = {}, None, False
    param.forget_unsharded()


def settle_param(param: ShardedParam, local: torch.Tensor) -> None:
    """Let the sharded parameter lie as planned, with ``local`` as this rank's shard."""
    if any(leaf.is_meta for leaf in _torch.leaves(_torch.local_tensor(param.sharded))):
        # It gets memory, and stays the object that it is.
        made = _torch.from_local(local, param.spec)
        exchange(param.sharded, _torch.parameter_of(made, param.sharded.requires_grad))
        param.hold(param.sharded)
    _torch.relocate(param.sharded, local, param.spec)
    param.adopt_local(local)


def leave_param(param: ShardedParam, nothing: torch.Tensor, spec: _torch.DTensorSpec) -> None:
    """Let a parameter lie on other ranks alone, described by ``spec``."""
    param.sharded.grad = None
    param.forget_unsharded()
    _torch.relocate(param.sharded, nothing, spec)
    param.local, param.place, param.spec = nothing, None, spec


def exchange(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let a parameter become another one, with its own hooks and attributes."""
    _torch.share_hooks(old, new)
    new.__dict__.update(old.__dict__)
    torch.utils.swap_tensors(old, new)
