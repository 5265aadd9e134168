"""Training with formats on the wire, compared with unsharded models and with sums by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from nets import assert_same, average_gradients
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training.cases import Case, cases, reproducible

from composable_shard import BlockFormat, CPUOffloadPolicy, RankMismatchError, fully_shard, wire
from composable_shard import MixedPrecisionPolicy as Policy
from composable_shard.testing import RankError, run_ranks
from composable_shard.testing.strategies import policies

INT8, FP8 = BlockFormat(torch.int8), BlockFormat(torch.float8_e4m3fn, 128)


def net() -> nn.Sequential:
    """Return weights of 2,040 elements in uneven rows, and two biases that stay precise."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 51), nn.Tanh(), nn.Linear(51, 40))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def as_sent(format: Any, rows: torch.Tensor) -> torch.Tensor:
    (decoded,) = format.decode(format.encode([rows], 0), [rows.shape[1]])
    return torch.as_tensor(decoded)


# Gathers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_bf16_gathers_compute_as_a_model_with_rounded_weights(ranks: int) -> None:
    plain, model = net(), fully_shard(net(), mp_policy=Policy(gather_wire=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            whole = sharded.full_tensor().detach()
            is_sent = whole.ndim > 1 and dist.get_world_size() > 1  # one rank sends nothing
            param.data.copy_(whole.bfloat16() if is_sent else whole)
            param.grad = None
        for each in (plain, model):
            each(batch(dist.get_rank(), step)).square().sum().backward()
        model.reshard()
        average_gradients(plain.parameters())
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            assert sharded.grad.dtype == torch.float32
            assert_same(sharded.grad, param.grad)
        optimizer.step()
        optimizer.zero_grad()


GATHERS: list[dict[str, Any]] = [
    {"mp_policy": Policy(gather_wire=INT8)},
    {"mp_policy": Policy(gather_wire=torch.float16, reduce_wire=FP8), "sharding": "zero1"},
    {"mp_policy": Policy(torch.bfloat16, gather_wire=FP8), "reshard_after_forward": 2},
    {
        "mp_policy": Policy(gather_wire=FP8, reduce_wire=INT8),
        "shard_placement_fn": lambda param: Shard(param.ndim - 1),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    },
]


def gather(index: int) -> None:
    options = GATHERS[index]
    plain, model, policy = net(), fully_shard(net(), **options), options["mp_policy"]
    state = model.state_dict()
    for name, original in plain.state_dict().items():
        assert torch.equal(state[name].full_tensor(), original)
    model(batch(dist.get_rank())).float().square().sum().backward()
    model.reshard()
    expected = []
    for sharded in model.parameters():
        local = sharded.to_local().detach()
        if sharded.ndim > 1:
            local = as_sent(wire.format_of(policy.gather_wire), local.reshape(1, -1)).view_as(local)
        size = {"shape": sharded.shape, "stride": sharded.stride()}
        mine = DTensor.from_local(local, sharded.device_mesh, sharded.placements, **size)
        expected.append(mine.full_tensor().to(policy.param_dtype or torch.float32))
    model.unshard()
    for param, values in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param, values)
        parts = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, param.detach())
        assert all(torch.equal(part, param) for part in parts)


@pytest.mark.parametrize("index", range(len(GATHERS)))
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_compute_with_the_decoded_shards_of_all(index: int, ranks: int) -> None:
    run_ranks(gather, ranks, index)


# Reductions -----------------------------------------------------------------------------------


def grads_by_hand(rank: int, step: int) -> list[torch.Tensor]:
    plain = net()
    plain(batch(rank, step)).square().sum().backward()
    return [param.grad for param in plain.parameters() if param.grad is not None]


@pytest.mark.parametrize("format", [INT8, FP8])
@pytest.mark.parametrize("extents", [(2,), (3,), (2, 2)])
@on_ranks("extents")
def test_reductions_are_the_mean_of_decoded_gradients(
    extents: tuple[int, ...], format: BlockFormat
) -> None:
    names, num_shards = ("replicate", "shard")[-len(extents) :], extents[-1]
    mesh = init_device_mesh("cpu", extents, mesh_dim_names=names)
    model = fully_shard(net(), mesh=mesh, mp_policy=Policy(reduce_wire=format))
    for step in range(2):  # what accumulates without sync is sent as one sum
        model.set_requires_gradient_sync(step == 1)
        model(batch(dist.get_rank(), step)).square().sum().backward()
    num_ranks = dist.get_world_size()
    sums = [
        [a + b for a, b in zip(grads_by_hand(r, 0), grads_by_hand(r, 1), strict=True)]
        for r in range(num_ranks)
    ]
    for index, param in enumerate(model.parameters()):
        if param.ndim > 1:
            for grads in sums:
                parts = [p.reshape(1, -1) for p in grads[index].chunk(num_shards)]
                sent = torch.cat([as_sent(format, part)[0] for part in parts])
                grads[index] = sent.view(param.shape)
        assert_same(param.grad, sum(grads[index] for grads in sums) / num_ranks)


@on_ranks(2)
def test_an_overflow_arrives_and_does_not_stay() -> None:
    for format in (torch.int8, torch.float8_e5m2, torch.float16):
        layer = nn.Linear(64, 32, bias=False)
        fully_shard(layer, mp_policy=Policy(reduce_wire=format))
        for value, is_finite in ((torch.inf, False), (torch.nan, False), (1.0, True)):
            layer.zero_grad()
            x = torch.ones(1, 64)
            x[0, 5] = value if dist.get_rank() else 1.0
            layer(x).sum().backward()
            grad = layer.weight.grad.full_tensor()
            assert bool(grad[:, 5].isfinite().all()) == is_finite
            assert bool(grad.isfinite().all()) == is_finite


@on_ranks(2)
def test_random_rounding_is_repeated_by_the_same_seed_and_leaves_the_users_alone() -> None:
    found = []
    for seed in (0, 0, 1):
        format = BlockFormat(torch.int8, stochastic=True, seed=seed)
        model = fully_shard(net(), mp_policy=Policy(reduce_wire=format))
        state, grads = torch.get_rng_state(), []
        for _ in range(2):
            model(batch(dist.get_rank())).square().sum().backward()
            grads.append(model[0].weight.grad.to_local().clone())
            model.zero_grad()
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(*grads)
        found.append(torch.cat(grads))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# Any program ----------------------------------------------------------------------------------


class Lossless:
    """Sends float64, so that any program trains exactly."""

    def nbytes(self, numels: list[int]) -> int:
        return 8 * sum(numels)

    def encode(self, params: list[torch.Tensor], seed: int) -> torch.Tensor:
        return torch.cat(params, 1).double().view(torch.uint8)

    def decode(self, encoded: torch.Tensor, numels: list[int]) -> Sequence[torch.Tensor]:
        return encoded.view(torch.float64).split(numels, 1)


def shard_wired(model: nn.Module, *, shard: Any, **options: Any) -> nn.Module:
    with mock.patch.object(wire, "MIN_NUMEL", 1):
        return shard(model, **options)


@pytest.mark.parametrize("differs", [False, True])
@reproducible(15)
@given(st.data(), policies([torch.float64]))
def test_any_tree_follows_any_program(differs: bool, data: st.DataObject, policy: Policy) -> None:
    case: Case = data.draw(cases((torch.float32, torch.float64), differs=differs))
    if "accumulate" in case.program:  # in the widest dtype of a group, which the oracle ignores
        policy = replace(policy, reduce_dtype=torch.float64)
    names = data.draw(
        st.sampled_from([["gather_wire"], ["reduce_wire"], ["gather_wire", "reduce_wire"]])
    )
    policy = replace(policy, **dict.fromkeys(names, Lossless()))
    case.check(shard=partial(shard_wired, shard=case.options.pop("shard")), policy=policy)


def train(policy: Policy) -> float:
    model = fully_shard(net(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        x = batch(dist.get_rank(), step)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("stochastic", [False, True])
def test_int8_learns_as_fast(stochastic: bool) -> None:
    format = BlockFormat(torch.int8, stochastic=stochastic)
    policies = Policy(), Policy(gather_wire=torch.int8, reduce_wire=format)
    precise, rough = (run_ranks(train, 2, policy) for policy in policies)
    assert sum(precise) < 1.5 and sum(rough) < 1.05 * sum(precise)


# What is refused on ranks ---------------------------------------------------------------------


class Short(Lossless):
    def encode(self, params: list[torch.Tensor], seed: int) -> torch.Tensor:
        return params[0].view(torch.uint8)


class Narrow(Lossless):
    def decode(self, encoded: torch.Tensor, numels: list[int]) -> Sequence[torch.Tensor]:
        return encoded.view(torch.float64)[:1].split(numels, 1)


def run(formats: list[Any]) -> None:
    policy = Policy(gather_wire=formats[dist.get_rank()])
    fully_shard(net(), mp_policy=policy)(batch(0))


REFUSED = [
    ([INT8, FP8], RankMismatchError, f"gather_wire {INT8}"),
    ([Lossless(), Short()], RankMismatchError, "gather_wire Lossless"),
    ([Short()] * 2, ValueError, "Expected Short.encode to return (torch.uint8, (1, 16480))"),
    (
        [Narrow()] * 2,
        ValueError,
        "Expected Narrow.decode to return [(2, 1040), (2, 1020)], got [(1, ",
    ),
]


@pytest.mark.parametrize(("formats", "kind", "text"), REFUSED)
def test_what_a_format_must_not_do_is_refused(formats: Any, kind: Any, text: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(run, 2, formats)
    failure = caught.value.agreed()
    assert failure.exception_type is kind and text in failure.message
