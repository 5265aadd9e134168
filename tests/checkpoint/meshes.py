"""Models on meshes of several axes, whose states are those of one unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_shard import ShardPlacementResult, fully_shard

WIDTH = 6
Build = Callable[[nn.Module, DeviceMesh], nn.Module]


class Block(nn.Module):
    """An MLP whose hidden units may be cut; a scalar; a bias of fewer rows than ranks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale + self.shift


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard_all(model: nn.Module, **kwargs: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard_all(model, mesh=mesh)


def inner_dim(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard_all(
        model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None
    )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    return shard_all(model, mesh=mesh[names])


def own_mesh(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the weights over the second axis, where the first replicates; the rest over both."""
    everywhere = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_all(
        model,
        mesh=everywhere,
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), mesh) if p.ndim > 1 else None,
    )


@dataclass(frozen=True)
class Case:
    """How a model lies on a mesh of these extents along axes of these names."""

    build: Build
    extents: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        return torch.Size(self.extents).numel()

    def __call__(self, model: nn.Module) -> nn.Module:
        return self.build(model, init_device_mesh("cpu", self.extents, mesh_dim_names=self.names))


HYBRID, TP, HYBRID_TP = ("replicate", "shard"), ("shard", "tp"), ("replicate", "shard", "tp")
CASES = {
    "1-d": Case(data_parallel, (3,), ("shard",)),
    "hybrid": Case(data_parallel, (2, 2), HYBRID),
    "hybrid-inner": Case(inner_dim, (2, 2), HYBRID),
    "own-mesh": Case(own_mesh, (2, 2), HYBRID),
    "tp": Case(tensor_parallel, (2, 2), TP),
    "tp-alone": Case(tensor_parallel, (1, 2), TP),
    "hybrid-tp": Case(tensor_parallel, (2, 1, 2), HYBRID_TP),
}
