"""From a strategy and process groups to the mesh that ``fully_shard`` takes."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import DataParallelMeshDims
from composable_shard.compat.fsdp1.choices import Choices, ProcessGroups, ShardingStrategy
from composable_shard.mesh import start_process_group

_HYBRID_NAMES = ("replicate", "shard")


@dataclass(frozen=True)
class Layout:
    """Over which ranks parameters are sharded and replicated.

    Attributes:
        strategy: The strategy, which is ``NO_SHARD`` on one rank.
        mesh: The mesh for ``fully_shard``.
        dims: Its axis that replicates, if there is none that shards.
    """

    strategy: ShardingStrategy
    mesh: DeviceMesh
    dims: DataParallelMeshDims | None = None


def resolve_layout(choices: Choices, device_type: str, wraps_below: bool) -> Layout:
    """Find the mesh of a strategy.

    Args:
        choices: Strategy and ranks; all ranks if absent.
        device_type: Type of the device of compute.
        wraps_below: Whether all wrappers of the tree are made by one call.

    Raises:
        ValueError: If the ranks are given in both forms, or in one that does not fit the strategy.

    Collective: for a pair of process groups an all-gather of a small object; making process groups
        for a hybrid strategy without any.
    """
    process_group, device_mesh = choices.process_group, choices.device_mesh
    if process_group is not None and device_mesh is not None:
        raise ValueError("Expected process_group or device_mesh, got both; pass one of them")
    strategy = choices.sharding_strategy or ShardingStrategy.FULL_SHARD
    if device_mesh is None and process_group is None:
        start_process_group()
    if strategy.is_hybrid:
        mesh = _hybrid_mesh(strategy, process_group, device_mesh, device_type, wraps_below)
    else:
        mesh = _flat_mesh(strategy, process_group, device_mesh, device_type)
    if mesh.size() == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"One rank has nothing to shard: it uses `NO_SHARD` instead of {strategy}",
                stacklevel=4,
            )
        return Layout(ShardingStrategy.NO_SHARD, mesh)
    if strategy is not ShardingStrategy.NO_SHARD:
        return Layout(strategy, mesh)
    if mesh.mesh_dim_names is None:
        mesh = DeviceMesh.from_group(
            mesh.get_group(), mesh.device_type, mesh_dim_names=("replicate",)
        )
    assert mesh.mesh_dim_names is not None
    return Layout(strategy, mesh, DataParallelMeshDims(replicate=mesh.mesh_dim_names[0]))


def _flat_mesh(
    strategy: ShardingStrategy,
    process_group: ProcessGroups,
    device_mesh: DeviceMesh | None,
    device_type: str,
) -> DeviceMesh:
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"Expected device_mesh to have 1 axis for {strategy}, got {device_mesh.ndim}: "
                f"{device_mesh}; pass one axis of it, or a hybrid strategy"
            )
        return device_mesh
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"Expected process_group to be one ProcessGroup for {strategy}, got "
            f"{type(group).__name__}; pairs of them are for hybrid strategies"
        )
    return DeviceMesh.from_group(group, device_type)


def _hybrid_mesh(
    strategy: ShardingStrategy,
    process_group: ProcessGroups,
    device_mesh: DeviceMesh | None,
    device_type: str,
    wraps_below: bool,
) -> DeviceMesh:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have 2 axes (replicate, shard) for {strategy}, got "
                f"{device_mesh.ndim}: {device_mesh}"
            )
        if device_mesh.mesh_dim_names is not None:
            return device_mesh
        groups = [device_mesh.get_group(0), device_mesh.get_group(1)]
        return DeviceMesh.from_group(
            groups, device_mesh.device_type, device_mesh.mesh, mesh_dim_names=_HYBRID_NAMES
        )
    if process_group is None:
        if not wraps_below:
            raise ValueError(
                f"Expected process groups or a device_mesh for {strategy} without an "
                "auto_wrap_policy, got none; pass the same ones to all nested wrappers"
            )
        return _mesh_of_nodes(device_type)
    pair = process_group if isinstance(process_group, tuple) else ()
    if len(pair) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in pair):
        raise ValueError(
            "Expected process_group to be a pair of process groups (shard, replicate) for "
            f"{strategy}, got {type(process_group).__name__}"
        )
    shards, replicas = pair
    rows: list[list[int]] = [[]] * replicas.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shards), group=replicas)
    return DeviceMesh.from_group(
        [replicas, shards], device_type, torch.tensor(rows), mesh_dim_names=_HYBRID_NAMES
    )


def _mesh_of_nodes(device_type: str) -> DeviceMesh:
    """Return a mesh (nodes, ranks of a node)."""
    num_ranks = dist.get_world_size()
    said = os.environ.get("LOCAL_WORLD_SIZE")
    if said is not None:
        per_node = int(said)
    elif device_type == "cpu":
        per_node = num_ranks
    else:
        per_node = torch.accelerator.device_count()
    if per_node < 1 or num_ranks % per_node:
        raise ValueError(
            f"Expected the ranks of a node to divide all {num_ranks} ranks, got {per_node}; "
            "pass a device_mesh of 2 axes (replicate, shard)"
        )
    shape = (num_ranks // per_node, per_node)
    return init_device_mesh(device_type, shape, mesh_dim_names=_HYBRID_NAMES)
