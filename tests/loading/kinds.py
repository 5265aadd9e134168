"""Models of parameters and buffers of every kind, tied ones, and ones cut in unusual ways."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from composable_shard import fully_shard
from composable_shard.train.full import same_bits


class Kinds(nn.Module):
    """Parameters of many shapes, dtypes and strides, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in self.tensors():
            self.register_parameter(
                name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            )
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.absent = nn.Linear(2, 2, bias=False)
        self.absent.register_parameter("weight", None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "even", torch.randn(6, 2)
        yield "uneven", torch.randn(7, 3)
        yield "one_row", torch.randn(1, 4)
        yield "no_rows", torch.randn(0, 4)
        yield "scalar", torch.randn(())
        yield "inner", torch.randn(2, 7)
        yield "transposed", torch.randn(5, 4).t()
        yield "image", torch.randn(3, 2, 2, 2).to(memory_format=torch.channels_last)
        yield "low", torch.randn(4, 2).bfloat16()
        yield "fp16", torch.randn(4).half()
        yield "fp64", torch.randn(4).double()
        yield "small", torch.randn(6, 2).to(torch.float8_e4m3fn)
        yield "integer", torch.randint(99, (5,))
        yield "byte", torch.randint(99, (5,), dtype=torch.uint8)
        yield "complex", torch.randn(5, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def shard(model: nn.Module, **kwargs: object) -> nn.Module:
    inner = model.inner
    return fully_shard(
        model, shard_placement_fn=lambda param: Shard(1) if param is inner else None, **kwargs
    )


def kinds(seed: int) -> Kinds:
    torch.manual_seed(seed)
    return Kinds()


class Tied(nn.Module):
    """Weights of two groups that are one, and a module that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4)
        self.again = self.block
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("alias", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.block(self.embed(x))))


def in_turns(mesh_extents: tuple[int, ...]) -> nn.Module:
    """Return a model whose parameters are cut otherwise than fully_shard does it."""
    mesh = init_device_mesh("cpu", mesh_extents, mesh_dim_names=("a", "b"))
    torch.manual_seed(1)
    model = nn.Module()
    places = {
        "runs": [_StridedShard(0, split_factor=3), Shard(0)],
        "both": [Shard(0), Shard(1)],
        "nested": [Shard(1), Shard(1)],
    }
    for name, placements in places.items():
        tensor = distribute_tensor(torch.randn(13, 7), mesh, placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def differences(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Tell which tensors are not the same in every bit."""
    assert got.keys() == wanted.keys()
    return [
        name
        for name in wanted
        if got[name].shape != wanted[name].shape
        or got[name].dtype != wanted[name].dtype
        or not same_bits(got[name], wanted[name])
    ]
