"""What tests of moving a model share: meshes, all that a rank has, and its memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

MiB = 2**20


def on_mesh(*ranks: Any) -> DeviceMesh:
    """Return a mesh of these ranks: of one axis, or of two if they come as rows."""
    is_hybrid = not isinstance(ranks[0], int)
    names = ("replicate", "shard") if is_hybrid else ("shard",)
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


def is_in(mesh: DeviceMesh) -> bool:
    return dist.get_rank() in mesh.mesh.flatten().tolist()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all that this rank has, by name."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name} {key}", inner)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found[name] = local.detach().clone()
        else:
            found[name] = torch.tensor(hash(str(value)))

    add("", model.state_dict())
    add("", optimizer.state_dict()["state"])
    return found


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.stride() == other[name].stride(), name


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def return_unused() -> None:
    """Let the allocator give the system what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
