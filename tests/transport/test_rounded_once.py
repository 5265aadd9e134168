"""A reduction in half precision is the float64 sum, divided and rounded once, where we add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import MixedPrecisionPolicy, fully_shard

SHAPES = ((37, 5), (64, 64), (11,))
HALVES = [torch.bfloat16, torch.float16]


class Weighed(nn.Module):
    """The gradient of each parameter is the factor that it is multiplied by."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * f).sum() for p, f in zip(self.params, factors, strict=True))  # type: ignore[return-value]


def factors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return numbers whose sum is exact in float32, and is not if it is rounded on the way."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for shape in SHAPES:
        exponents = torch.randint(-4, 5, shape, generator=generator)
        numbers = torch.randn(shape, generator=generator).to(dtype) * 2.0**exponents
        found.append(numbers.to(dtype))
    return found


def mean(tensors: list[torch.Tensor], divisor: float | None = None) -> torch.Tensor:
    """Return the mean, rounded once to the dtype of the tensors."""
    total = torch.stack([tensor.double() for tensor in tensors]).sum(0)
    return (total / (divisor or len(tensors))).to(tensors[0].dtype)


def rounded_each_time(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


def expected_of(rows: int, shards: int, dtype: torch.dtype, divisor: float | None) -> Any:
    """Average over the shards, then over the replicas; return also the naive result."""
    by_rank = [factors(rank, dtype) for rank in range(rows * shards)]
    once, naive = [], []
    for tensors in zip(*by_rank, strict=True):
        own = divisor and divisor / rows
        parts = [mean(list(tensors[r * shards : (r + 1) * shards]), own) for r in range(rows)]
        once.append(mean(parts))
        naive.append(rounded_each_time(list(tensors)))
    return once, naive


def mesh_of(rows: int, shards: int) -> DeviceMesh:
    if rows == 1:
        return init_device_mesh("cpu", (shards,))
    return init_device_mesh("cpu", (rows, shards), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("kept", ["float32", "the same"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("extents", "divisor"),
    [
        *[((1, 3), None), ((1, 4), None), ((1, 3), 3.5), ((1, 4), 7.0)],
        *[((3, 1), None), ((4, 1), None), ((2, 2), None), ((2, 2), 7.0)],
    ],
    ids=str,
)
@on_ranks("extents")
def test_a_gradient_is_rounded_once_in_each_reduction(
    extents: tuple[int, int], divisor: float | None, dtype: torch.dtype, kept: str
) -> None:
    parameters = torch.float32 if kept == "float32" else dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model: Any = fully_shard(Weighed(parameters), mesh=mesh_of(*extents), mp_policy=policy)
    if divisor is not None:
        model.set_gradient_divide_factor(divisor)
    model(factors(dist.get_rank(), dtype)).backward()
    model.reshard()
    once, naive = expected_of(*extents, dtype, divisor)
    for param, wanted in zip(model.parameters(), once, strict=True):
        assert torch.equal(param.grad.full_tensor(), wanted.to(parameters))
    # Rounding each sum would show.
    assert any(not torch.equal(a, b) for a, b in zip(once, naive, strict=True))


@pytest.mark.parametrize("extents", [(1, 2), (1, 4), (2, 2), (4, 1)], ids=str)
@on_ranks("extents")
def test_a_mean_that_fits_does_not_overflow_on_the_way(extents: tuple[int, int]) -> None:
    """Average what is almost as large as float16 can be."""
    model: Any = fully_shard(Weighed(torch.float16), mesh=mesh_of(*extents))
    model([torch.full(shape, 60000.0, dtype=torch.float16) for shape in SHAPES]).backward()
    model.reshard()
    assert all((param.grad.full_tensor() == 60000).all() for param in model.parameters())
