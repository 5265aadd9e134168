"""Scalars, other strides, mixed dtypes: parameters of every kind train as the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes.compare import Oracle, step_differences
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from composable_shard import fully_shard


class Kinds(nn.Module):
    """A convolution in channels-last, a transposed weight, a strided one, scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 5).T)
        self.strided = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(-0.5))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale
        return F.linear(x, self.transposed) @ self.strided.tanh() + self.offset * self.frozen


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, 3, 5, 5, generator=generator)


@pytest.mark.parametrize("dim", [None, 1, -1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_scalars_and_other_strides(dim: int | None) -> None:
    train(dim, None, True)


@on_ranks(4)
def test_scalars_and_other_strides_on_a_hybrid_mesh() -> None:
    train(None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), True)


@on_ranks(4)
def test_scalars_and_other_strides_gather_from_fewer_ranks() -> None:
    train(None, None, 2)


def train(dim: int | None, mesh: DeviceMesh | None, reshard: bool | int) -> None:
    torch.manual_seed(0)
    model = Kinds()
    oracle = Oracle(model)
    place = None if dim is None else lambda param: Shard(dim) if param.ndim > 1 else None
    for module in (model.conv, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=place, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    for step in range(6):
        model.set_requires_gradient_sync(step % 3 != 0)
        model.set_requires_all_reduce(step % 3 != 1)
        for either in (model, oracle.model):
            either(batch(step)).square().sum().backward()
        oracle.take()
        if step % 3 == 2:
            model.reshard()
            oracle.reduce()
            assert step_differences(model, oracle, optimizers) == []
        elif mesh is None and step % 3 == 1:
            oracle.reduce()


@on_ranks(2)
def test_strides_are_kept_and_scalars_replicated() -> None:
    strides = {"conv.weight": (27, 1, 9, 3), "transposed": (1, 5), "strided": (4, 1)}
    model: Any = fully_shard(Kinds(), reshard_after_forward=False)
    for name, stride in strides.items():
        param = model.get_parameter(name)
        assert (param.stride(), param.placements) == (stride, (Shard(0),))
    model(batch(0)).sum().backward()
    model.unshard()
    assert {name: model.get_parameter(name).stride() for name in strides} == strides
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    model.reshard()
    assert model.scale.placements == (Replicate(),) and model.scale.to_local().shape == ()
