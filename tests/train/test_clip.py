"""Clipping by norm against torch on the unsharded gradients, on any mix of meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import Net, full, own_input, shard_net, train_step, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import ShardError, _torch, clip_grad_norm_
from composable_shard.testing import RankError, run_ranks

torch_clip = torch.nn.utils.clip_grad_norm_

# How one gradient lies: the shape of its mesh (of four ranks; () for a plain tensor), and where.
Place = tuple[tuple[int, ...], tuple[str, ...]]
PLACEMENTS: dict[str, Any] = {
    "S0": Shard(0),
    "S1": Shard(1),
    "R": Replicate(),
    "SS0": _StridedShard(0, split_factor=2),
    "sum": Partial("sum"),
    "avg": Partial("avg"),
}
PLACES: list[Place] = [
    ((), ()),
    ((4,), ("S0",)),
    ((4,), ("S1",)),
    ((4,), ("R",)),
    ((4,), ("avg",)),
    ((2, 2), ("R", "S0")),
    ((2, 2), ("S0", "R")),
    ((2, 2), ("S0", "S1")),
    ((2, 2), ("SS0", "S0")),
    ((2, 2), ("S1", "sum")),
    ((2, 2), ("avg", "S0")),
    ((2, 2), ("avg", "sum")),
    ((1, 4), ("S0", "S0")),
]
ORDERS = [2.0, 1.0, 3.5, math.inf, -math.inf, -1.0, 0.0]


def meshes(places: Sequence[Place]) -> dict[tuple[int, ...], DeviceMesh]:
    return {shape: init_device_mesh("cpu", shape) for shape in sorted({s for s, _ in places if s})}


def laid_out(whole: torch.Tensor, mesh: DeviceMesh | None, names: Sequence[str]) -> torch.Tensor:
    """Lay out a gradient that all ranks know; this rank's share of a pending one is random."""
    if mesh is None:
        return whole.clone()
    placements = [PLACEMENTS[name] for name in names]
    settled = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(whole, mesh, settled, src_data_rank=None).to_local().clone()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if not placement.is_partial():
            continue
        # Every other rank of the axis adds a part; this one takes them away from its own.
        size = mesh.size(axis)
        parts = [torch.full_like(local, 0.25 * (rank + 1)) for rank in range(size)]
        parts[-1] = -sum(parts[:-1])  # type: ignore[call-overload]
        scale = 1 if placement.reduce_op == "avg" else 1 / size
        local = local * scale + parts[coordinate[axis]]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def own_gradient(shape: Sequence[int], index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_gradients(
    places: Sequence[Place], shapes: Sequence[Sequence[int]]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return parameters with gradients laid out as asked, and plain ones with the same."""
    found = meshes(places)
    laid, plain = [], []
    for index, ((mesh_shape, names), shape) in enumerate(zip(places, shapes, strict=True)):
        whole = own_gradient(shape, index)
        grad = laid_out(whole, found.get(mesh_shape), names)
        settled = grad
        if isinstance(grad, DTensor):
            placements = [Replicate() if p.is_partial() else p for p in grad.placements]
            settled = grad.redistribute(placements=placements)
            if names == ("avg",):  # as an accumulated gradient of a sharded parameter
                settled = settled.redistribute(placements=[Shard(0)])
        laid.append(nn.Parameter(torch.zeros_like(settled)))
        laid[-1].grad = grad
        plain.append(with_grad(whole))
    return laid, plain


def clip_both(places: Sequence[Place], shapes: Sequence[Sequence[int]], order: float) -> float:
    """Clip, together and one by one; return the norm, which is one for both, bit by bit."""
    norms = set()
    for foreach in (None, True, False):
        laid, plain = with_gradients(places, shapes)
        expected = torch_clip(plain, 0.5, order)
        total = clip_grad_norm_(iter(laid), 0.5, order, foreach=foreach)
        assert type(total) is torch.Tensor and total.shape == () and total.dtype == torch.float64
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        for param, reference, place in zip(laid, plain, places, strict=True):
            assert param.grad is not None
            if isinstance(param.grad, DTensor):  # it is where it was
                assert param.grad.placements == tuple(PLACEMENTS[name] for name in place[1])
            torch.testing.assert_close(full(param.grad), reference.grad, rtol=1e-10, atol=1e-12)
        norms.add(total.item())
    (norm,) = norms
    return norm


def assert_ranks_agree(results: list[float]) -> None:
    assert all(result == results[0] for result in results), results  # the same bits


SHAPES = [(6, 4), (3, 5), (2, 2), (5, 1), (1, 3), (7, 6), (2, 9), (4, 4), (9, 2), (3, 3)]
SHAPES += [(8, 2), (4, 2), (5, 5)]


@pytest.mark.parametrize("order", ORDERS)
def test_any_mix_of_meshes_and_placements(order: float) -> None:
    assert_ranks_agree(run_ranks(clip_both, 4, PLACES, SHAPES, order))


# What is communicated ------------------------------------------------------------------------


GRID = (2, 2)


@pytest.mark.parametrize(
    ("places", "numels"),
    [
        ([((4,), ("S0",))] * 50, [1]),
        ([((), ()), ((4,), ("R",)), (GRID, ("R", "R"))], []),
        ([(GRID, ("R", "S0"))] * 3, [1]),
        # What is sharded on both axes goes over each, and what is sharded on one goes over that.
        ([(GRID, ("S0", "S1")), (GRID, ("S0", "R")), (GRID, ("R", "S0"))] * 9, [1, 1, 1, 1]),
        ([((1, 4), ("S0", "S0")), ((4,), ("S1",))], [1]),
    ],
)
@on_ranks(4)
def test_one_gather_for_each_axis(places: list[Place], numels: list[int]) -> None:
    laid, _ = with_gradients(places, [(4, 4)] * len(places))
    carried, gather = list[int](), _torch.all_gather_rows  # how many values each carries

    def counted(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        carried.append(own.numel())
        gather(output, own, group)

    with mock.patch.object(_torch, "all_gather_rows", counted):
        clip_grad_norm_(laid, 1.0)
    assert carried == numels


def clip_experts(order: float) -> float:
    """Clip parameters of all ranks together with experts, of which each pair of ranks has its own.

    The rows of the experts are sharded within a pair, and which experts on the other axis.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    line = init_device_mesh("cpu", (4,))
    laid, plain = [], []
    for index, (mesh, placements) in enumerate(
        [(line, [Shard(0)]), (grid, [Shard(0), Shard(1)]), (grid["shard"], [Shard(1)])]
    ):
        whole = own_gradient((4, 6), index)
        laid.append(nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))
        laid[-1].grad = laid[-1].detach().clone()
        plain.append(with_grad(whole.clone()))
    expected, total = torch_clip(plain, 1.0, order), clip_grad_norm_(laid, 1.0, order)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for param, reference in zip(laid, plain, strict=True):
        torch.testing.assert_close(full(param.grad), reference.grad, rtol=1e-12, atol=0)
    return total.item()


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_slice_of_a_mesh_beside_the_whole(order: float) -> None:
    assert_ranks_agree(run_ranks(clip_experts, 4, order))


# Sharded models ------------------------------------------------------------------------------


def assert_same_grads(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, **tolerance)


CLIPS: list[Callable[[Any], torch.Tensor]] = [
    lambda model: model.clip_grad_norm_(0.5),
    lambda model: clip_grad_norm_(model.parameters(), 0.5),
    lambda model: model.clip_grad_norm_(max_norm=0.5, norm_type=2.0, error_if_nonfinite=True),
]


def train_clipped() -> list[float]:
    reference, model = two_nets()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    totals = []
    for step, clip in enumerate(CLIPS):
        for one in (reference, model):
            train_step(one, step, None)
        expected, total = torch_clip(reference.parameters(), 0.5), clip(model)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
        assert expected > 0.5  # or nothing was clipped
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(param), other.detach(), rtol=1e-5, atol=1e-6)
        totals.append(total.item())
    return [*totals, clip_accumulated(2.0), clip_accumulated(math.inf), clip_while_unsharded()]


def clip_accumulated(order: float) -> float:
    """Clip what was accumulated without sync, which counts as its mean; then go on and sync it."""
    reference, model = two_nets()
    with model.no_sync():
        train_step(model, 0, None)
    train_step(reference, 0, None)
    grads = {name: param.grad.placements for name, param in model.named_parameters()}
    if dist.get_world_size() > 1:
        assert set(grads.values()) == {(Partial("avg"),)}
    expected = torch_clip(reference.parameters(), 0.5, order)
    total = clip_grad_norm_(model.parameters(), 0.5, order)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert {name: param.grad.placements for name, param in model.named_parameters()} == grads
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)
    train_step(model, 1, None)
    before = [param.grad for param in reference.parameters()]
    reference.zero_grad()
    train_step(reference, 1, None)
    for param, earlier in zip(reference.parameters(), before, strict=True):
        param.grad.add_(earlier)
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)
    return total.item()


def clip_while_unsharded() -> float:
    """Clip what ``parameters()`` has given while the modules held unsharded parameters."""
    reference, model = two_nets()
    model.set_reshard_after_forward(False)
    model(own_input())
    params = list(model.parameters())
    assert not any(isinstance(param, DTensor) for param in params)
    for one in (reference, model):
        train_step(one, 0, None)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    total, expected = clip_grad_norm_(params, 0.5), torch_clip(reference.parameters(), 0.5)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    assert_same_grads(model, reference, rtol=1e-5, atol=1e-7)
    return total.item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_with_clipping(num_ranks: int) -> None:
    assert_ranks_agree(run_ranks(train_clipped, num_ranks))


# Dtypes and special values -------------------------------------------------------------------


def sharded_param(value: torch.Tensor) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
    param.grad = param.detach().clone()
    return param


@on_ranks(2)
def test_dtypes_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(5, 3, generator=generator)
    for dtypes in (
        [torch.bfloat16],
        [torch.float16, torch.float16],
        [torch.float16, torch.bfloat16],
        [torch.float32, torch.bfloat16],
        [torch.float64, torch.float32],
        [torch.complex64],
        [torch.complex128, torch.float32],
    ):
        values = [whole.to(dtype) * (1 + 1j if dtype.is_complex else 1) for dtype in dtypes]
        params = [sharded_param(value) for value in values]
        plain = [with_grad(value.clone()) for value in values]
        wide = [
            with_grad(value.to(torch.promote_types(dtype, torch.float64)))
            for value, dtype in zip(values, dtypes, strict=True)
        ]
        total, expected = clip_grad_norm_(params, 0.5), torch_clip(plain, 0.5)
        assert total.dtype == expected.dtype
        # Torch rounds the norm of each gradient to half precision; here they stay wide.
        torch.testing.assert_close(total, torch_clip(wide, 0.5).to(total.dtype))
        for param, other in zip(params, wide, strict=True):
            torch.testing.assert_close(full(param.grad), other.grad.to(param.dtype))


@on_ranks(3)
def test_no_gradient_small_ones_and_special_ones() -> None:
    param = sharded_param(torch.ones(2, 2))
    param.grad = None
    for parameters in ([param], param, [], iter([])):
        total = clip_grad_norm_(parameters, 1.0)
        assert torch.equal(total, torch.tensor(0.0)) and total.dtype == torch.float32
    small = sharded_param(torch.full((2, 2), 0.25))
    torch.testing.assert_close(clip_grad_norm_(small, 1.0), torch.tensor(0.5))
    # The coefficient is at most 1, so what is small enough stays bit by bit.
    assert torch.equal(full(small.grad), torch.full((2, 2), 0.25))
    empty = sharded_param(torch.ones(0, 2))
    for order in ORDERS:
        torch.testing.assert_close(
            clip_grad_norm_([small, empty], 1.0, order),
            torch_clip(with_grad(torch.full((2, 2), 0.25)), 1.0, order),
        )
    # A norm that float16 cannot hold still scales as it should; powers of two stay exact.
    half = sharded_param(torch.full((4, 4), 30000.0, dtype=torch.float16))
    total = clip_grad_norm_(half, 1.0)
    assert total.dtype == torch.float16 and total.isinf()
    assert torch.equal(full(half.grad), torch.full((4, 4), 0.25, dtype=torch.float16))
    exact = sharded_param(torch.full((4, 4), 2.0))
    assert clip_grad_norm_(exact, 8.0, math.inf).item() == 2.0
    assert torch.equal(full(exact.grad), torch.full((4, 4), 2.0))


def with_grad(value: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(value))
    param.grad = value
    return param


# Errors --------------------------------------------------------------------------------------

NON_FINITE = (
    "Expected gradients of a finite norm of order {}, got {}, because of the gradients "
    "of 'norm.weight' of group 'blocks.0', 'out.bias' of the root group; "
    "set error_if_nonfinite=False to scale them by it anyway"
)
PRODUCT = (
    "Expected pending gradients of ('sum', 'avg', 'max', 'min'), got P(product); redistribute "
    "them first"
)
SUBCLASS = "Expected gradients with a plain norm, got TwoTensor; clip its inner tensors"


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_all_ranks_and_else_scales_as_in_torch(
    order: float, value: float
) -> None:
    """One rank alone has a gradient that is not finite."""
    model = shard_net(Net(1))
    model(own_input()).sum().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        for param in (model.blocks[0].norm.weight, model.out.bias):
            param.grad.to_local()[-1] = value
    before = [param.grad.to_local().clone() for param in model.parameters()]
    with pytest.raises(ShardError) as caught:
        clip_grad_norm_(model.parameters(), 1.0, order, True)
    assert str(caught.value) == NON_FINITE.format(order, value)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.to_local().nan_to_num(), grad.nan_to_num())
    assert str(model.clip_grad_norm_(1.0, order, False).item()) == str(value)
    for param in model.parameters():
        local = param.grad.to_local()
        assert (local.isnan() | ((local == 0) & (value == math.inf))).all()


def accumulate_rows_too_many() -> None:
    model = shard_net(Net(1))
    weight = model.blocks[0].down.weight
    grad = torch.ones(4, weight.to_local().shape[1])
    weight.grad = DTensor.from_local(
        grad, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    model(own_input()).sum().backward()


def clip_product() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()], src_data_rank=None))
    param.grad = DTensor.from_local(torch.ones(2), mesh, [Partial("product")], run_check=False)
    clip_grad_norm_(param, 1.0)


def clip_two_tensors() -> None:
    param = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    param.grad = TwoTensor(torch.ones(2), torch.ones(2))
    clip_grad_norm_(param, 1.0)


@pytest.mark.parametrize(
    ("fn", "kind", "text"),
    [
        (clip_product, "ValueError", PRODUCT),
        (clip_two_tensors, "TypeError", SUBCLASS),
        (
            accumulate_rows_too_many,
            "ShardError",
            "Expected a gradient of local shape [3, 13] in .grad of 'down.weight', got [4, 13]; "
            "assign one with the rows of this rank",
        ),
    ],
)
def test_what_is_refused(fn: Callable[[], None], kind: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2)
    failure = caught.value.agreed()
    assert (failure.type_name, failure.message) == (kind, text)


@on_ranks(2)
def test_a_rank_outside_of_the_mesh() -> None:
    mesh = DeviceMesh("cpu", [0])
    param = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)], src_data_rank=None))
    param.grad = param.detach().clone()
    if dist.get_rank() == 1:
        with pytest.raises(ValueError) as caught:
            clip_grad_norm_(param, 1.0)
        text = f"Expected gradients on rank 1, got one on {mesh}; omit that one"
        assert str(caught.value) == text


def test_of_many_gradients_that_are_not_finite_the_first_are_named() -> None:
    params = [with_grad(torch.full((2,), math.inf)) for _ in range(5)]
    with pytest.raises(ShardError) as caught:
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    names = ", ".join(["a parameter of shape [2]"] * 3)
    assert f"got inf, because of the gradients of {names}; set" in str(caught.value)
    huge = [with_grad(torch.full((1,), 3e38)) for _ in range(2)]
    with pytest.raises(ShardError, match=r"of order 1\.0, got inf; set"):
        clip_grad_norm_(huge, 1.0, 1.0, error_if_nonfinite=True)
