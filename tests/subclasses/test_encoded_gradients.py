"""Gradients whose tensor types decide what travels: exact if nothing is lost, and agreed on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from near import Apart
from nets import Net, assert_same, average_gradients, full, own_input, shard_net
from on_ranks import on_ranks
from torch import nn
from training.cases import reproducible

from composable_shard import (
    MixedPrecisionPolicy,
    fully_shard,
)
from composable_shard.testing import TreeLoss, TreeSpec, assert_trains_like_unsharded, run_ranks
from composable_shard.testing.strategies import (
    meshes,
    module_trees,
    policies,
    reshard_choices,
    training_programs,
    uses,
)
from int8_gradients import send_int8_gradients
from subclasses.lossless import Lossless, as_type, shard_encoded, wire

# What arrives ----------------------------------------------------------------------------------


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


@on_ranks(2)
def test_hooks_are_called_where_there_is_a_gradient_and_none_is_where_nobody_has_one() -> None:
    model = fully_shard(as_type(Branches(), Lossless))
    for choice, sums, num_calls in (
        ((0, 0), [18.0, None], ([1, 0], [1, 0])),
        ((0, 2), [9.0, None], ([2, 0], [1, 0])),
        ((2, 1), [None, 9.0], ([2, 0], [1, 1])),
        ((2, 2), [None, None], ([2, 0], [1, 1])),
    ):
        model.zero_grad()
        model(torch.full((3, 3), 2.0, requires_grad=True), choice[dist.get_rank()]).sum().backward()
        grads = [weight.grad for weight in model.weights]
        assert [None if g is None else g.full_tensor().sum().item() for g in grads] == sums
        calls = [weight._local_tensor.num_calls for weight in model.weights]
        assert calls == num_calls[dist.get_rank()]


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


# Any tree -----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[TreeSpec, list[str], dict[str, Any]]:
    mesh = draw(meshes())
    spec = draw(module_trees(mesh[-1]))
    loss = TreeLoss(draw(uses(draw(st.integers(1, 3)), spec.num_params)))
    program = draw(training_programs(without=["fail_backward"]))
    reshard = draw(reshard_choices(mesh[-1]))
    return spec, program, {"mesh": mesh, "loss": loss, "reshard_after_forward": reshard}


@reproducible(20)
@given(cases(), policies([torch.float64]))
def test_any_tree_with_encoded_gradients_follows_any_program(
    case: tuple[TreeSpec, list[str], dict[str, Any]], policy: MixedPrecisionPolicy
) -> None:
    spec, program, options = case
    assert_trains_like_unsharded(
        spec, program, shard=shard_encoded, policy=policy, timeout=30, **options
    )
