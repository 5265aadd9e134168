"""Parameters that are DTensors on a mesh of all axes, the data-parallel ones named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from composable_shard import DataParallelMeshDims, fully_shard

WIDTH = 6
HIDDEN = 10


class TwoLayers(nn.Module):
    """A column-parallel layer and a row-parallel one, on DTensors throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x * self.scale, self.up)), self.down)


Axes = tuple[tuple[int, ...], tuple[str, ...]]


def distribute(model: TwoLayers, mesh: DeviceMesh) -> None:
    """Cut the weights over the axis ``tp``, replicate them over all others."""
    assert mesh.mesh_dim_names is not None
    for name, dim in (("up", 0), ("down", 1), ("scale", None)):
        placements: list[Placement] = [
            Shard(dim) if axis == "tp" and dim is not None else Replicate()
            for axis in mesh.mesh_dim_names
        ]
        param = model.get_parameter(name)
        setattr(model, name, nn.Parameter(distribute_tensor(param.data, mesh, placements)))


CASES = [
    (((2, 2), ("dp", "tp")), DataParallelMeshDims(shard="dp")),
    (((2, 2), ("dp", "tp")), DataParallelMeshDims(replicate="dp")),
    (((2, 2, 1), ("rep", "dp", "tp")), DataParallelMeshDims(shard="dp", replicate="rep")),
    (((2, 1, 2), ("rep", "dp", "tp")), DataParallelMeshDims(shard="dp", replicate="rep")),
    (((2, 2, 1), ("dp", "cp", "tp")), DataParallelMeshDims(shard=("dp", "cp"))),
    (((2, 1, 2), ("dp", "cp", "tp")), DataParallelMeshDims(shard=("dp", "cp"))),
    (((2, 2, 1), ("a", "b", "tp")), DataParallelMeshDims(replicate=("a", "b"))),
]


@pytest.mark.brief(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("axes", "dims"), CASES)
@on_ranks(4, timeout=30)
def test_training_equals_that_of_the_oracle(
    axes: Axes, dims: DataParallelMeshDims, dim: int
) -> None:
    """Train on rows that are spread over the data-parallel axes; tell what differs."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", axes[0], mesh_dim_names=axes[1])
    model, oracle = TwoLayers(), TwoLayers()
    oracle.load_state_dict(model.state_dict())
    distribute(model, mesh)
    fully_shard(
        model,
        mesh=mesh,
        dp_mesh_dims=dims,
        shard_placement_fn=lambda p: Shard(dim) if p.ndim > 1 else None,
    )
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    rows: list[Placement] = [Replicate() if axis == "tp" else Shard(0) for axis in axes[1]]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, oracle)]
    found: list[object] = []
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        out = model(distribute_tensor(x, mesh, rows))
        loss = out.square().sum()
        assert isinstance(loss, DTensor)
        loss.full_tensor().backward()
        oracle(x).square().sum().backward()
        for name, param in model.named_parameters():
            got, wanted = full(param.grad), oracle.get_parameter(name).grad
            assert param.grad.placements == param.placements
            if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-4):
                found.append((step, name, (got - wanted).abs().max().item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        if not torch.allclose(full(param), oracle.get_parameter(name), rtol=1e-4, atol=1e-4):
            found.append(name)
    assert found == []


AVERAGE = Partial("avg")
STRIDED = "_StridedShard(dim=0, sf=2), Shard(dim=0))"
ACTING_AS_ONE = [
    (*CASES[0], f"({STRIDED}", 2, (AVERAGE, Shard(0))),
    (*CASES[5], f"({STRIDED}", 2, (AVERAGE, Shard(0))),
    (*CASES[3], f"(Replicate(), {STRIDED}", 3, (AVERAGE, AVERAGE, Shard(0))),
]


@pytest.mark.parametrize(("axes", "dims", "placements", "num_axes", "of_grad"), ACTING_AS_ONE)
@on_ranks(4)
def test_axes_that_shard_act_as_one(
    axes: Axes, dims: DataParallelMeshDims, placements: str, num_axes: int, of_grad: object
) -> None:
    mesh = init_device_mesh("cpu", axes[0], mesh_dim_names=axes[1])
    model = TwoLayers()
    distribute(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    rows: list[Placement] = [Replicate() if axis == "tp" else Shard(0) for axis in axes[1]]
    with model.no_sync():  # type: ignore[operator]
        loss = model(distribute_tensor(torch.ones(8, WIDTH), mesh, rows)).sum()
        loss.full_tensor().backward()
    up = model.up
    assert (str(up.placements), up.device_mesh.ndim) == (placements, num_axes)
    assert up.grad.placements == of_grad  # type: ignore[union-attr]
