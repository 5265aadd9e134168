"""Scalars, other strides, mixed dtypes: parameters of every kind train as the oracle's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes.compare import Oracle, gradient_differences, step_differences, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks


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


def train(dim: int | None, hybrid: bool, reshard: bool | int) -> list[str]:
    torch.manual_seed(0)
    model = Kinds()
    oracle = Oracle(model)
    mesh = None
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    place = None if dim is None else lambda param: Shard(dim) if param.ndim > 1 else None
    fully_shard(model.conv, mesh=mesh, shard_placement_fn=place, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    found: list[str] = []
    for step in range(6):
        model.set_requires_gradient_sync(step % 3 != 0)
        model.set_requires_all_reduce(step % 3 != 1)
        for either in (model, oracle.model):
            either(batch(step)).square().sum().backward()
        oracle.take()
        if step % 3 == 2:
            model.reshard()
            oracle.reduce()
            found += step_differences(model, oracle, optimizers)
        elif not hybrid and step % 3 == 1:
            oracle.reduce()
    return found


@pytest.mark.parametrize("dim", [None, 1, -1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scalars_and_other_strides(ranks: int, dim: int | None) -> None:
    assert run_ranks(train, ranks, dim, False, True, timeout=30) == [[]] * ranks


def test_scalars_and_other_strides_on_a_hybrid_mesh() -> None:
    assert run_ranks(train, 4, None, True, True, timeout=30) == [[]] * 4


def test_scalars_and_other_strides_gather_from_fewer_ranks() -> None:
    assert run_ranks(train, 4, None, False, 2, timeout=30) == [[]] * 4


def strides() -> list[object]:
    torch.manual_seed(0)
    model = fully_shard(Kinds(), reshard_after_forward=False)
    seen: list[object] = []
    for name in ("conv.weight", "transposed", "strided"):
        param = model.get_parameter(name)
        assert isinstance(param, DTensor)
        seen.append((name, param.stride(), param.placements))
    model(batch(0)).sum().backward()
    model.unshard()  # type: ignore[operator]
    for name in ("conv.weight", "transposed", "strided"):
        seen.append(model.get_parameter(name).stride())
    seen.append(model.conv.weight.is_contiguous(memory_format=torch.channels_last))
    model.reshard()  # type: ignore[operator]
    seen += [model.scale.placements, tuple(model.scale.to_local().shape)]  # type: ignore[operator]
    return seen


def test_strides_are_kept_and_scalars_replicated() -> None:
    expected = [
        ("conv.weight", (27, 1, 9, 3), (Shard(0),)),
        ("transposed", (1, 5), (Shard(0),)),
        ("strided", (4, 1), (Shard(0),)),
        (27, 1, 9, 3),
        (1, 5),
        (4, 1),
        True,
        (Replicate(),),
        (),
    ]
    assert run_ranks(strides, 2) == [expected] * 2


class Mixed(nn.Module):
    """Parameters of four dtypes in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 6, dtype=torch.bfloat16)
        self.single = nn.Linear(6, 6)
        self.high = nn.Linear(6, 3, dtype=torch.float64)
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.single(self.low(x.bfloat16()).float()) * self.table
        return self.high(x.double())


def train_mixed() -> list[str]:
    torch.manual_seed(0)
    model = Mixed()
    oracle = Oracle(model)
    fully_shard(model)
    found: list[str] = []
    for step in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step + 5 * dist.get_rank()))
        for either in (model, oracle.model):
            either(x).sum().backward()
        oracle.take()
        oracle.reduce()
        model.reshard()  # type: ignore[attr-defined]
        found += gradient_differences(dict(model.named_parameters()), oracle)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mixed_dtypes_in_one_group(ranks: int) -> None:
    assert run_ranks(train_mixed, ranks) == [[]] * ranks


def scalar_in_low_precision() -> list[object]:
    torch.manual_seed(0)
    model = Kinds()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mp_policy=policy)
    inside: list[torch.dtype] = []
    model.conv.register_forward_hook(lambda *_: inside.append(model.scale.dtype))
    model(batch(0)).float().sum().backward()
    model.reshard()  # type: ignore[attr-defined]
    grad = model.scale.grad
    same = [torch.zeros(())] * dist.get_world_size()
    dist.all_gather(same, whole(grad))
    return [inside, grad.dtype, all(torch.equal(one, same[0]) for one in same)]


def test_a_scalar_in_low_precision_has_the_same_gradient_on_all_ranks() -> None:
    assert run_ranks(scalar_in_low_precision, 3) == [[[torch.bfloat16], torch.float32, True]] * 3
