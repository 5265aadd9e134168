"""Gradients whose tensor types decide what travels: exact if nothing is lost, and agreed on."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from near import Apart
from nets import Net, assert_same, average_gradients, full, own_input, shard_net
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable_shard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from composable_shard.testing import ParamSpec, TreeSpec, assert_trains_like_unsharded, run_ranks
from int8_gradients import BLOCK, Int8Gradients, send_int8_gradients
from subclasses.lossless import Lossless, as_type, shard_encoded, wire

# What arrives ----------------------------------------------------------------------------------


TREE = TreeSpec(
    (ParamSpec((5, 3)), ParamSpec((6,))), (TreeSpec((ParamSpec((3, 5), dim=1), ParamSpec((4, 2)))),)
)
PROGRAM: list[Any] = [*("accumulate", "backward", "step", "zero_grad"), *("backward", "step") * 2]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        *((mesh, {}) for mesh in [(1,), (2,), (3,), (2, 2), (2, 1)]),
        ((2,), {"reshard_after_forward": False}),
        ((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
)
def test_what_loses_nothing_trains_as_the_plain_model(
    mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert_trains_like_unsharded(TREE, PROGRAM, mesh=mesh, shard=shard_encoded, **options)


def exchange() -> None:
    """Compare gradients with those of the plain model; each group sends once."""
    plain = Net()
    model = shard_net(as_type(copy.deepcopy(plain), Lossless))
    for step in range(2):
        with wire() as sent:
            for each in (plain, model):
                each.zero_grad()
                each(own_input(step)).square().sum().backward()
        assert len(sent) == 3
        average_gradients(plain.parameters())
        for param, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert type(other.grad._local_tensor) is torch.Tensor
            assert_same(full(other.grad), param.grad)


def test_ranks_that_exchange_messages() -> None:
    run_ranks(exchange, 2)
    run_ranks(Apart(exchange), 3)


@pytest.mark.parametrize("divisor", [None, 8.0])
@pytest.mark.parametrize("sums_only", [False, True])
@on_ranks(3)
def test_sums_are_taken_in_fp32_and_divided_before_they_are_narrowed(
    divisor: float | None, sums_only: bool
) -> None:
    layer = as_type(nn.Linear(3, 4, bias=False), Lossless)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float16))
    if divisor is not None:
        layer.set_gradient_divide_factor(divisor)
    layer.set_force_sum_reduction_for_comms(sums_only)
    (layer(torch.full((1, 3), 300.0)) * 100).sum().backward()
    expected = 3 * 30_000 / (divisor or 3)  # 90,000 is more than a half can hold
    grad = layer.weight.grad.full_tensor()
    assert torch.equal(grad, torch.full((4, 3), expected).half().float())


class Branches(nn.Module):
    """Uses one of two weights, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x * self.weights[which] if which < 2 else x


def backward_of(model: nn.Module, choice: tuple[int, int]) -> tuple[list[float | None], int]:
    """Let each rank use the weight of its choice; return sums of gradients, and exchanges."""
    model.zero_grad()
    loss = model(torch.full((3, 3), 2.0, requires_grad=True), choice[dist.get_rank()]).sum()
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as said:
        loss.backward()
    grads = [weight.grad for weight in model.weights]
    sums = [None if grad is None else grad.full_tensor().sum().item() for grad in grads]
    return sums, said.call_count


@on_ranks(2)
def test_hooks_are_called_where_there_is_a_gradient_and_none_is_where_nobody_has_one() -> None:
    model = fully_shard(as_type(Branches(), Lossless))
    for choice, sums, num_calls in (
        ((0, 0), [18.0, None], ([1, 0], [1, 0])),
        ((0, 2), [9.0, None], ([2, 0], [1, 0])),
        ((2, 1), [None, 9.0], ([2, 0], [1, 1])),
        ((2, 2), [None, None], ([2, 0], [1, 1])),
    ):
        assert backward_of(model, choice)[0] == sums
        calls = [weight._local_tensor.num_calls for weight in model.weights]
        assert calls == num_calls[dist.get_rank()]


@on_ranks(2)
def test_what_hooks_returned_is_known_when_more_becomes_trainable() -> None:
    """Formats are exchanged once, while weights are (un)frozen.

    The second hook of Lossless compares the metadata with what the first one returned last.
    """
    model = fully_shard(as_type(Branches(), Lossless))
    for choice, trains, sums, num_exchanges in (
        ((0, 0), False, [18.0, None], 1),
        ((0, 1), True, [9.0, 9.0], 1),
        ((1, 1), True, [None, 18.0], 0),
        ((0, 1), True, [9.0, 9.0], 0),
    ):
        model.weights[1].requires_grad_(trains)
        assert backward_of(model, choice) == (sums, num_exchanges)


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2)
def test_a_weight_that_lies_transposed_in_memory(dim: int) -> None:
    """Its rows are the columns in memory."""
    plain = nn.Linear(5, 3, bias=False)
    layer = copy.deepcopy(plain)
    layer.weight = nn.Parameter(Lossless(plain.weight.detach().t().contiguous().t()))
    fully_shard(layer, shard_placement_fn=lambda _: Shard(dim))
    for step in range(2):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        for each in (plain, layer):
            each(x).square().sum().backward()
    average_gradients(plain.parameters())
    torch.testing.assert_close(full(layer.weight.grad), plain.weight.grad)
    assert layer.weight._local_tensor.t().is_contiguous()


@on_ranks(4)
def test_under_tensor_parallelism() -> None:
    """A weight that is cut by a model-parallel axis too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    plain = nn.Linear(6, 4, bias=False)
    layer = copy.deepcopy(plain)
    local = Lossless(layer.weight.detach().chunk(2)[mesh["model"].get_local_rank()].clone())
    layer.weight = nn.Parameter(DTensor.from_local(local, mesh["model"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    x = torch.randn(3, 6, generator=generator)
    layer(DTensor.from_local(x, mesh["model"])).square().sum().backward()
    plain(x).square().sum().backward()
    average_gradients(plain.parameters())  # each part of the data is on two ranks
    torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.weight.grad)


# What is lost ----------------------------------------------------------------------------------


def rounded(parts: torch.Tensor) -> torch.Tensor:
    """Round as int8 blocks of a row each do, in numbers."""
    scales = parts.abs().amax(1, keepdim=True) / 127
    return (parts / scales.clamp_min(1e-30)).round() * scales


@on_ranks(2)
def test_int8_gradients_are_rounded_as_by_hand_and_what_is_lost_comes_later() -> None:
    layer = nn.Linear(8, 5, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    lost = [torch.zeros(2, 24) for _ in range(2)]
    for step in range(4):
        batches = [
            torch.randn(3, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            for rank in range(2)
        ]
        with wire() as sent:
            layer(batches[dist.get_rank()]).sum().backward()
        # two rows of 24 int8, padded to 32 bytes, a scale, padded to 16, a flag, padded to 16
        assert sent == [2 * (32 + 16 + 16)]
        total = torch.zeros(2, 24)  # rows 0 to 2, and rows 3 and 4 with one of padding
        for rank, x in enumerate(batches):
            own = x.sum(0).expand(5, 8)
            exact = nn.functional.pad(own, (0, 0, 0, 1)).view(2, 24) + lost[rank]
            lost[rank] = exact - rounded(exact)
            total += rounded(exact)
        assert torch.equal(layer.weight.grad.full_tensor(), (total / 2).view(6, 8)[:5])
        layer.zero_grad()


@on_ranks(2)
def test_an_overflow_is_seen_and_does_not_stay() -> None:
    layer = nn.Linear(2, 2, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    layer(torch.tensor([[1.0, torch.inf]])).sum().backward()
    assert not layer.weight.grad.full_tensor().isfinite().any()
    layer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.ones(2, 2))


@on_ranks(2)
def test_int8_gradients_take_little_more_than_a_quarter_of_the_bytes() -> None:
    layer, numel = nn.Linear(256, 128, bias=False), 256 * 128
    send_int8_gradients(layer)
    fully_shard(layer)
    with wire() as sent:
        layer(torch.ones(1, 256)).sum().backward()
    assert sum(sent) == numel + 4 * (numel // BLOCK) + 2 * 16 <= 0.3 * 4 * numel


def test_tied_weights_send_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    send_int8_gradients(model)
    assert model[1].weight is model[0].weight
    assert all(isinstance(param, Int8Gradients) for param in model.parameters())


class Shared(nn.Module):
    """Has one weight twice, a frozen one, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.again = self.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.again * self.scale + self.frozen


@on_ranks(2)
def test_ties_within_a_module_and_what_is_frozen_or_scalar_stay_as_they_are() -> None:
    model = Shared()
    expected = (torch.ones(1, 3) @ model.weight @ model.weight).sum().item()
    send_int8_gradients(model)
    assert model.again is model.weight
    assert not model.frozen.requires_grad
    kinds = [type(param.detach()).__name__ for param in model.parameters()]
    assert kinds == ["Int8Gradients", "Tensor", "Tensor"]
    fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    assert model.scale.grad.full_tensor().item() == pytest.approx(expected)
