"""What gradients are divided by, set when some of them are accumulated and not reduced."""

from __future__ import annotations

import copy
import itertools
from typing import cast

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_shard.errors import ShardError

FACTORS = 3.0, 7.0
NUM_MICROBATCHES = 4


def network() -> nn.Sequential:
    """Rows that do not divide by the ranks, and small parameters beside large ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def inputs(rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(4, 5, generator=generator)


def sums_of(model: nn.Module, divisor: float) -> dict[str, torch.Tensor]:
    """The gradients of all ranks and microbatches, summed and divided once."""
    model.zero_grad()
    for rank in range(dist.get_world_size()):
        for microbatch in range(NUM_MICROBATCHES):
            model(inputs(rank, microbatch)).square().sum().backward()
    return {
        name: param.grad / divisor
        for name, param in model.named_parameters()
        if param.grad is not None
    }


WAYS = "in time", "afterwards", "seen"
FEW = [
    *[((2, 2), "replicas apart", False), ((2, 2), "seen", True), ((3,), "afterwards", False)],
    *[((2,), "in time", True), ((1,), "seen", False)],
]
CASES = dict.fromkeys([*FEW, *itertools.product([(1,), (2,), (3,), (2, 2)], WAYS, [False, True])])


@pytest.mark.brief(5)
@pytest.mark.parametrize(("shape", "way", "is_wide"), CASES)
@on_ranks("shape")
def test_a_factor_divides_what_was_accumulated_before(
    shape: tuple[int, ...], way: str, is_wide: bool
) -> None:
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    plain = network()
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if is_wide else None)
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), "mp_policy": policy}
    fully_shard([model[0], model[2]], **options)
    root = cast("FSDPModule", fully_shard(model, **options))
    assert isinstance(model[0], FSDPModule)
    for microbatch in range(NUM_MICROBATCHES):
        is_last = microbatch == NUM_MICROBATCHES - 1
        if way == "replicas apart":
            root.set_requires_all_reduce(is_last)
        else:
            root.set_requires_gradient_sync(is_last)
        if microbatch == 1:
            model[0].set_gradient_divide_factor(FACTORS[0])
        if is_last and way != "afterwards":
            model[0].set_gradient_divide_factor(FACTORS[1])
        if is_last and way in ("afterwards", "seen"):
            root.set_requires_gradient_sync(False)
        model(inputs(dist.get_rank(), microbatch)).square().sum().backward()
    if way == "afterwards":
        model[0].set_gradient_divide_factor(FACTORS[1])
    if way != "seen":  # what stands in .grad gives the same before it is reduced
        root.synchronize_gradients()
    expected = sums_of(plain, FACTORS[1])
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        assert any(p.is_partial() for p in param.grad.placements) == (way == "seen")
        torch.testing.assert_close(
            param.grad.full_tensor().float(), expected[name], rtol=2e-5, atol=1e-5
        )


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)])
@on_ranks("shape")
def test_a_factor_is_refused_where_what_was_reduced_would_be_divided_again(
    shape: tuple[int, ...],
) -> None:
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    root = cast("FSDPModule", fully_shard(model, mesh=mesh))
    model(torch.ones(1, 4)).sum().backward()
    with root.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    root.set_gradient_divide_factor(dist.get_world_size())  # as before
    with pytest.raises(ShardError) as caught:
        root.set_gradient_divide_factor(5.0)
    root.synchronize_gradients()
    root.set_gradient_divide_factor(5.0)  # what is reduced stays
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.full_tensor()[0, 0].item() == 2.0
    assert str(caught.value) == (
        "Expected .grad of 'weight' reduced or unreduced when the divisor changes, got a sum of "
        "both; call synchronize_gradients() or zero_grad()"
    )
