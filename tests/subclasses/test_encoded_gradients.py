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
from composable_shard.testing import run_ranks
from int8_gradients import BLOCK, Int8Gradients, send_int8_gradients
from subclasses.lossless import Lossless, as_type, wire

# What arrives ----------------------------------------------------------------------------------


def on_columns(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def trains_alike(kwargs: dict[str, Any], columns: bool, replicas: int, accumulates: bool) -> None:
    """Compare three steps with those of the plain model, bit by bit on two ranks."""
    if columns:
        kwargs["shard_placement_fn"] = on_columns
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        kwargs["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    plain = Net()
    model = shard_net(as_type(copy.deepcopy(plain), Lossless), **kwargs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        with wire() as sent:
            for micro in range(1 + accumulates):
                batch = own_input(10 * step + micro)
                model.set_requires_gradient_sync(micro == accumulates)
                for each in (plain, model):
                    each(batch).square().sum().backward()
        assert len(sent) == (3 if dist.get_world_size() > replicas else 0)
        average_gradients(plain.parameters())
        for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert type(other.grad._local_tensor) is torch.Tensor
            if columns:  # what is gathered has other strides, and is multiplied in another order
                torch.testing.assert_close(full(other.grad), param.grad, rtol=1e-5, atol=1e-5)
            else:
                assert_same(full(other.grad), param.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.brief(4)
@pytest.mark.parametrize(
    ("num_ranks", "kwargs", "columns", "replicas", "accumulates"),
    [
        (1, {}, False, 1, False),
        (2, {}, False, 1, False),
        (3, {}, False, 1, True),
        (2, {"reshard_after_forward": False}, True, 1, True),
        (3, {}, True, 1, False),
        (4, {}, False, 2, True),
        (2, {}, False, 2, False),
        (2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, False, 1, True),
    ],
)
def test_what_loses_nothing_trains_as_the_plain_model(
    num_ranks: int, kwargs: dict[str, Any], columns: bool, replicas: int, accumulates: bool
) -> None:
    run_ranks(trains_alike, num_ranks, kwargs, columns, replicas, accumulates)


def test_ranks_that_exchange_messages() -> None:
    run_ranks(Apart(trains_alike), 3, {}, False, 1, False)


def scaled(divisor: float | None, sums_only: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of a weight, and what they are by hand."""
    layer = nn.Linear(3, 4, bias=False)
    weight = layer.weight.detach().clone()
    as_type(layer, Lossless)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=torch.float16))
    if divisor is not None:
        layer.set_gradient_divide_factor(divisor)
    layer.set_force_sum_reduction_for_comms(sums_only)
    x = torch.full((1, 3), 300.0, dtype=dtype)  # the sum of squares of two overflows in fp16
    (layer(x) * 100).sum().backward()
    assert weight.shape == (4, 3)
    return [layer.weight.grad.full_tensor()]


@pytest.mark.parametrize("divisor", [None, 8.0])
@pytest.mark.parametrize("sums_only", [False, True])
def test_sums_are_taken_in_fp32_and_divided_before_they_are_narrowed(
    divisor: float | None, sums_only: bool
) -> None:
    ((grad,), _, _) = run_ranks(scaled, 3, divisor, sums_only, torch.float32)
    expected = 3 * 30_000 / (divisor or 3)  # 90,000 is more than a half can hold
    assert torch.equal(grad, torch.full((4, 3), expected).half().float())


class Branches(nn.Module):
    """Uses one of two weights, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x * self.weights[which] if which < 2 else x


def partly_used() -> list[list[float | None]]:
    """Return sums of the gradients when ranks use one weight, some or both of them, or none."""
    model = as_type(Branches(), Lossless)
    weights = fully_shard(model).weights
    found = []
    for choice in ((0, 0), (0, 2), (2, 1), (2, 2)):
        x = torch.full((3, 3), 2.0, requires_grad=True)
        model(x, choice[dist.get_rank()]).sum().backward()
        grads = [weight.grad for weight in weights]
        found.append([None if g is None else g.full_tensor().sum().item() for g in grads])
        found.append([weight._local_tensor.num_calls for weight in weights])
        model.zero_grad()
    return found


def test_hooks_are_called_where_there_is_a_gradient_and_none_is_where_nobody_has_one() -> None:
    first, second = run_ranks(partly_used, 2)
    assert first[::2] == second[::2] == [[18.0, None], [9.0, None], [None, 9.0], [None, None]]
    assert first[1::2] == [[1, 0], [2, 0], [2, 0], [2, 0]]
    assert second[1::2] == [[1, 0], [1, 0], [1, 1], [1, 1]]


def trainable_later() -> tuple[list[Any], list[int]]:
    """Return sums of gradients, and how often formats are exchanged, while weights are (un)frozen.

    The second hook of Lossless compares the metadata with what the first one returned last.
    """
    model = as_type(Branches(), Lossless)
    weights = fully_shard(model).weights
    sums, exchanges = [], []
    for choice, trains in (((0, 0), False), ((0, 1), True), ((1, 1), True), ((0, 1), True)):
        weights[1].requires_grad_(trains)
        x = torch.full((3, 3), 2.0, requires_grad=True)
        loss = model(x, choice[dist.get_rank()]).sum()
        with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as said:
            loss.backward()
        grads = [weight.grad for weight in weights]
        sums.append([None if g is None else g.full_tensor().sum().item() for g in grads])
        exchanges.append(said.call_count)
        model.zero_grad()
    return sums, exchanges


def test_what_hooks_returned_is_known_when_more_becomes_trainable() -> None:
    for sums, exchanges in run_ranks(trainable_later, 2):
        assert sums == [[18.0, None], [9.0, 9.0], [None, 18.0], [9.0, 9.0]]
        assert exchanges == [1, 1, 0, 0]


def transposed(dim: int) -> None:
    """A weight whose rows are the columns in memory."""
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


@pytest.mark.parametrize("dim", [0, 1])
def test_a_weight_that_lies_transposed_in_memory(dim: int) -> None:
    run_ranks(transposed, 2, dim)


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


def int8_steps() -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[int]]:
    """Return gradients of steps as they arrive, as each rank has them, and bytes on the wire."""
    layer = nn.Linear(8, 5, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    own, arrived, nbytes = [], [], []
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with wire() as sent:
            layer(x).sum().backward()
        own.append(x.sum(0).expand(5, 8).clone())
        arrived.append(layer.weight.grad.full_tensor())
        nbytes += sent
        layer.zero_grad()
    return arrived, own, nbytes


def test_int8_gradients_are_rounded_as_by_hand_and_what_is_lost_comes_later() -> None:
    (arrived, *_, nbytes), (same, *_) = ranks = run_ranks(int8_steps, 2)
    lost = [torch.zeros(2, 24) for _ in ranks]
    for step, grad in enumerate(arrived):
        assert torch.equal(grad, same[step])
        total = torch.zeros(2, 24)  # rows 0 to 2, and rows 3 and 4 with one of padding
        for rank, (_, own, _) in enumerate(ranks):
            exact = nn.functional.pad(own[step], (0, 0, 0, 1)).view(2, 24) + lost[rank]
            sent = rounded(exact)
            lost[rank] = exact - sent
            total += sent
        assert torch.equal(grad, (total / 2).view(6, 8)[:5])
    # two rows of 24 int8, padded to 32 bytes, a scale, padded to 16, a flag, padded to 16
    assert nbytes == [2 * (32 + 16 + 16)] * 4


def overflow() -> list[torch.Tensor]:
    """Return the gradients of a step that overflows, and of the next."""
    layer = nn.Linear(2, 2, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    found = []
    for value in (torch.inf, 1.0):
        layer(torch.tensor([[1.0, value]])).sum().backward()
        found.append(layer.weight.grad.full_tensor())
        layer.zero_grad()
    return found


def test_an_overflow_is_seen_and_does_not_stay() -> None:
    for first, second in run_ranks(overflow, 2):
        assert not first.isfinite().any()
        assert torch.equal(second, torch.ones(2, 2))


def test_int8_gradients_take_little_more_than_a_quarter_of_the_bytes() -> None:
    nbytes, numel = run_ranks(bytes_of_a_big_weight, 2)[0]
    blocks = numel // BLOCK
    assert nbytes == numel + 4 * blocks + 2 * 16
    assert nbytes <= 0.3 * 4 * numel


def bytes_of_a_big_weight() -> tuple[int, int]:
    layer = nn.Linear(256, 128, bias=False)
    send_int8_gradients(layer)
    fully_shard(layer)
    with wire() as sent:
        layer(torch.ones(1, 256)).sum().backward()
    return sum(sent), 256 * 128


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


def shared() -> tuple[list[str], float]:
    model = Shared()
    send_int8_gradients(model)
    assert model.again is model.weight
    assert not model.frozen.requires_grad
    kinds = [type(param.detach()).__name__ for param in model.parameters()]
    fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    return kinds, model.scale.grad.full_tensor().item()


def test_ties_within_a_module_and_what_is_frozen_or_scalar_stay_as_they_are() -> None:
    ((kinds, scale), (_, same)) = run_ranks(shared, 2)
    assert kinds == ["Int8Gradients", "Tensor", "Tensor"]
    torch.manual_seed(0)
    weight = Shared().weight
    assert scale == same == pytest.approx((torch.ones(1, 3) @ weight @ weight).sum().item())
