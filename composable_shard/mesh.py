"""Which ranks share a parameter, and on which device they compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ShardMesh:
    """A one-dimensional mesh over which parameters are sharded.

    Attributes:
        mesh: The DeviceMesh of the sharded DTensors.
        group: Process group of the ranks that share a parameter.
        num_shards: Number of ranks in the group.
        shard_rank: This rank's place in the group.
        device: Where this rank computes.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    num_shards: int
    shard_rank: int
    device: torch.device


def resolve_mesh(mesh: DeviceMesh | None) -> ShardMesh:
    """Read what sharding needs to know off a mesh.

    Args:
        mesh: A 1-D mesh, or ``None`` for all ranks on the current accelerator, else on the CPU;
            that starts the default process group from the environment if there is none.

    Raises:
        TypeError: If ``mesh`` is not a DeviceMesh.
        ValueError: If ``mesh`` is not one-dimensional.
    """
    if mesh is None:
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"Expected mesh to be a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
    if mesh.ndim != 1:
        raise ValueError(
            f"Expected mesh to have 1 dim, got {mesh.ndim}: {mesh}; "
            "pass the axis to shard over, such as mesh['shard']"
        )
    group = mesh.get_group()
    return ShardMesh(mesh, group, group.size(), group.rank(), _device_of(mesh))


def _default_mesh() -> DeviceMesh:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
