"""The wrapper: its ranks, what it forwards, its precision, and what it refuses."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeds.models import (
    CPU,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    full,
    nested,
    transformer,
    two_of,
    wrap_nested,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable_shard import FSDPModule, MaterializationError, ShardError, fully_shard
from composable_shard.compat.fsdp1 import (
    BackwardPrefetch,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
)
from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD, HYBRID_SHARD = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD
BF16 = torch.bfloat16


def assert_same_backward(model: nn.Module, reference: nn.Module, *batch: torch.Tensor) -> None:
    for either in (model, reference):
        either(*batch).square().sum().backward()
    average_gradients(reference)
    assert_same_gradients(model, reference)


def of_rank(*shape: int) -> torch.Tensor:
    return torch.full(shape, dist.get_rank() + 1.0)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 2)
    )


# Over which ranks -------------------------------------------------------------------------------


def train_as_plain(make: Callable[[nn.Module], Any]) -> Any:
    """Train a wrapped model beside a plain one; return the wrapped one."""
    plain, reference = two_of(mlp())
    model = make(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        seed = 100 * step + dist.get_rank()
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        assert_same_backward(model, reference, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    return model


@on_ranks(4)
def test_the_ranks_may_be_said_in_many_ways() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    pair = (named.get_group("ranks"), named.get_group("nodes"))
    everything = ModuleWrapPolicy({nn.Linear})
    flat, replicated = ((Shard(0),), (4,), 2 * (rank < 3)), ((Replicate(),), (4,), 6)
    hybrid = ((Replicate(), Shard(0)), (2, 2), 3)
    ways: list[tuple[Any, ShardingStrategy, dict[str, Any]]] = [
        (flat, FULL_SHARD, {}),
        (flat, SHARD_GRAD_OP, {"process_group": world}),
        (flat, FULL_SHARD, {"device_mesh": line, "auto_wrap_policy": everything}),
        (replicated, NO_SHARD, {"device_mesh": line}),
        (replicated, NO_SHARD, {"auto_wrap_policy": everything}),
        (hybrid, HYBRID_SHARD, {"process_group": pair}),
        (hybrid, HYBRID_SHARD, {"device_mesh": square}),
        (hybrid, HYBRID_SHARD, {"device_mesh": named, "auto_wrap_policy": everything}),
    ]
    for expected, strategy, kwargs in ways:
        model = train_as_plain(partial(FSDP, sharding_strategy=strategy, device_id=CPU, **kwargs))
        param = next(model.parameters())
        ranks = (2, rank % 2) if strategy is HYBRID_SHARD else (4, rank)
        assert (model.world_size, model.rank) == ranks
        got = (param.placements, param.device_mesh.shape, param.to_local().shape[0])
        assert got == expected


@on_ranks(2)
def test_strategies_free_what_they_say_and_hints_change_nothing() -> None:
    batch = nested().get_input(CPU)

    def events_of(*kinds: str, **kwargs: Any) -> list[tuple[str, str]]:
        model = wrap_nested(nested(), device_id=CPU, **kwargs)
        model(*batch).sum().backward()
        with record_events(model.module, *kinds) as events:
            model(*batch).sum().backward()
        return list(events)

    pre, post = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
    default = events_of(backward_prefetch=pre, forward_prefetch=False, limit_all_gathers=True)
    for prefetch, forward in ((post, True), (None, False)):
        assert default == events_of(
            backward_prefetch=prefetch, forward_prefetch=forward, limit_all_gathers=False
        )
    freed, kept = (
        events_of("all_gather", sharding_strategy=s) for s in (FULL_SHARD, SHARD_GRAD_OP)
    )
    names = [name for _, name in kept]
    assert len(names) == len(set(names)) == 4
    assert sorted(name for _, name in freed) == sorted([*names, *names[1:]])


# What it forwards -------------------------------------------------------------------------------


def test_names_are_those_of_the_plain_model() -> None:
    def names(module: nn.Module) -> list[list[str]]:
        kinds = (module.named_parameters, module.named_buffers)
        found: list[Any] = [of(remove_duplicate=d) for of in kinds for d in (False, True)]
        found += [
            dict(module.named_modules()).items(),
            module.named_parameters(prefix="m", recurse=True),
        ]
        return [[name for name, _ in pairs] for pairs in found]

    with fake_ranks(2):
        plain, reference = two_of(transformer(add_bn=True))
        model = FSDP(plain, auto_wrap_policy=always_wrap_policy, device_id="cpu")
        assert names(model) == names(reference)
        assert names(nn.Sequential(model)) == names(nn.Sequential(reference))


def test_attributes_and_items_are_those_of_the_wrapped_module() -> None:
    with fake_ranks(2):
        model = FSDP(mlp(), device_id="cpu")
    assert model.module is model._fsdp_wrapped_module
    assert isinstance(model.module, (nn.Sequential, FSDPModule))
    assert model[0] is model.module[0]
    assert [type(m).__name__ for m in model[:2]] == ["Linear", "Sequential"]
    model.module.note = "seen"
    assert model.note == "seen"
    with pytest.raises(AttributeError) as caught:
        _ = model.nothing
    assert str(caught.value) == "'FSDPSequential' object has no attribute 'nothing'"
    with pytest.raises(AttributeError):
        _ = FSDP.__new__(FSDP).anything


def test_roots() -> None:
    with fake_ranks(2):
        model = wrap_nested(nested(), device_id="cpu")
        wrappers = FSDP.fsdp_modules(model)
        assert [wrapper.check_is_root() for wrapper in wrappers] == [True, False, False, False]
        assert FSDP.fsdp_modules(model, root_only=True) == [model]
        two = nn.Sequential(
            FSDP(nn.Linear(1, 1), device_id="cpu"), FSDP(nn.ReLU(), device_id="cpu")
        )
        assert FSDP.fsdp_modules(two, root_only=True) == list(two)
        assert FSDP.fsdp_modules(nn.Linear(1, 1)) == []


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert not isinstance(module.weight, DTensor)
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)


@on_ranks(2)
def test_apply_sees_full_parameters() -> None:
    plain, reference = two_of(nested())
    model = wrap_nested(plain, device_id=CPU)
    torch.manual_seed(1)
    assert model.apply(initialize) is model
    torch.manual_seed(1)
    reference.apply(initialize)
    assert_same_parameters(model, reference)


@on_ranks(2)
def test_full_parameters_for_a_while() -> None:
    model = wrap_nested(nested(), device_id=CPU)
    model(*model.module.get_input(CPU)).sum().backward()
    inner = model.module.module[1]
    with FSDP.summon_full_params(model, recurse=False):
        assert not isinstance(model.module.module[0].weight, DTensor)
        assert isinstance(inner[1].weight, DTensor)
    with FSDP.summon_full_params(inner, recurse=False), torch.no_grad():
        assert isinstance(inner[0].weight, DTensor)
        inner[1].weight.fill_(3)
    with FSDP.summon_full_params(nn.Sequential(model), writeback=False, with_grads=True):
        assert torch.equal(inner[1].weight, torch.full((16, 16), 3.0))
        assert inner[1].weight.grad.shape == (16, 16)
        inner[0].weight.data.zero_()
    assert full(inner[1].weight).unique().tolist() == [3]
    assert full(inner[0].weight).any()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(inner[1].weight, DTensor) == (dist.get_rank() != 0)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@on_ranks(2)
def test_clip_grad_norm(strategy: ShardingStrategy) -> None:
    plain, reference = two_of(nested())
    model = wrap_nested(plain, sharding_strategy=strategy, device_id=CPU)
    for norm_type in (2.0, float("inf")):
        for either in (model, reference):
            either.zero_grad()
            either(*reference.get_input(CPU)).sum().backward()
        average_gradients(reference)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(0.1, norm_type), expected)
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_no_sync_of_an_inner_wrapper() -> None:
    model = wrap_nested(nested(), device_id=CPU)
    with model.module.module[1].no_sync():
        model(*model.module.get_input(CPU)).sum().backward()
    partial = [param.grad.placements[0].is_partial() for param in model.parameters()]
    assert partial == [False] * 2 + [True] * 4 + [False] * 4  # the second and third of five layers


@on_ranks(2)
def test_copies_of_wrappers_that_were_given_process_groups() -> None:
    plain, reference = two_of(mlp())
    model = FSDP(plain, process_group=dist.group.WORLD, use_orig_params=True, device_id=CPU)
    model = copy.deepcopy(model)
    assert model.fsdp_use_orig_params
    assert_same_backward(model, reference, of_rank(2, 4))


# Precision --------------------------------------------------------------------------------------


@on_ranks(2)
def test_batch_norms_are_exempt_by_default() -> None:
    plain, reference = two_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}),
        mixed_precision=MixedPrecision(BF16),
        device_id=CPU,
    )
    assert [type(w.module).__name__ for w in FSDP.fsdp_modules(model)] == [
        "FSDPSequential",
        "FSDPBatchNorm1d",
    ]
    batch = torch.randn(8, 4)
    for either in (model, reference):
        out = either(batch)
        out.square().sum().backward()
    assert out.dtype == torch.float32
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
    torch.testing.assert_close(
        model[1].running_mean, reference[1].running_mean, rtol=1e-2, atol=1e-3
    )
    average_gradients(reference)
    assert_same_gradients(model, reference, rtol=0.1, atol=0.1)


@on_ranks(2)
def test_low_precision_gradients_may_be_kept() -> None:
    for keep, dtype in ((True, BF16), (False, torch.float32)):
        precision = MixedPrecision(BF16, keep_low_precision_grads=keep)
        model = FSDP(mlp(), mixed_precision=precision, device_id=CPU)
        model(torch.ones(1, 4)).sum().backward()
        assert {param.grad.dtype for param in model.parameters()} == {dtype}


@on_ranks(2)
def test_evaluation_in_full_precision() -> None:
    """Also of parameters that are tied across wrappers."""
    batch = torch.arange(3)
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    plain[2].weight = plain[0].weight
    plain, reference = two_of(plain.eval())
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model = FSDP(
            plain,
            auto_wrap_policy=always_wrap_policy,
            mixed_precision=MixedPrecision(BF16),
            device_id=CPU,
        )
    with torch.no_grad():
        assert torch.equal(model(batch), reference(batch))
        assert [model(batch).dtype, model.train()(batch).dtype] == [torch.float32, BF16]
    model.train()(batch).sum().backward()
    with pytest.raises(ShardError) as caught:
        model.eval()(batch)
    assert str(caught.value) == (
        "Expected torch.no_grad() around a forward in evaluation with full precision, got "
        "gradients enabled; or unset FSDP_USE_FULL_PREC_IN_EVAL"
    )


# What is refused --------------------------------------------------------------------------------


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="meta"))

    def forward(self) -> torch.Tensor:
        return self.weight


class Loose(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([nn.Linear(2, 2)])
        self.scale = nn.Parameter(torch.ones(2))


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def wrap(module: Any = None, **kwargs: Any) -> Any:
    kwargs.setdefault("device_id", "cpu")
    return FSDP(linear() if module is None else module, **kwargs)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def ignoring(**kwargs: Any) -> Any:
    return wrap(nn.Sequential(linear(), linear()), **kwargs)


def in_variable(value: str) -> Any:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": value}):
        return wrap(sharding_strategy=HYBRID_SHARD, auto_wrap_policy=always_wrap_policy)


CASES: dict[str, Callable[[], object]] = {
    "TypeError: Expected module to be an nn.Module, got str: 'layer'": lambda: wrap("layer"),
    "TypeError: Expected sharding_strategy to be a "
    "composable_shard.compat.fsdp1.options.ShardingStrategy, got str: 'FULL_SHARD'": lambda: wrap(
        sharding_strategy="FULL_SHARD"
    ),
    "TypeError: Expected use_orig_params to be a builtins.bool, got int: 1": lambda: wrap(
        use_orig_params=1
    ),
    "TypeError: Expected param_init_fn to be a collections.abc.Callable, got str: 'init'": (
        lambda: wrap(param_init_fn="init")
    ),
    "ValueError: Expected process_group or device_mesh, got both; pass one of them": (
        lambda: wrap(process_group=dist.group.WORLD, device_mesh=mesh_of(4))
    ),
    "ValueError: Expected device_mesh to have 1 axis for ShardingStrategy.FULL_SHARD, got "
    "DeviceMesh((2, 2), 'cpu', stride=(2, 1))": lambda: wrap(device_mesh=mesh_of(2, 2)),
    "ValueError: Expected process_group to be a ProcessGroup for "
    "ShardingStrategy.FULL_SHARD, got 'tuple'": (
        lambda: wrap(process_group=(dist.group.WORLD, dist.group.WORLD))
    ),
    "ValueError: Expected device_mesh to have 2 axes (replicate, shard) for "
    "ShardingStrategy.HYBRID_SHARD, got DeviceMesh((4,), 'cpu', stride=(1,))": (
        lambda: wrap(device_mesh=mesh_of(4), sharding_strategy=HYBRID_SHARD)
    ),
    "ValueError: Expected process groups or a device_mesh for "
    "ShardingStrategy.HYBRID_SHARD without an auto_wrap_policy, got none; pass the same "
    "ones to all nested wrappers": lambda: wrap(sharding_strategy=HYBRID_SHARD),
    "ValueError: Expected process_group to be a pair of process groups (shard, replicate) "
    "for ShardingStrategy.HYBRID_SHARD, got 'ProcessGroup'": (
        lambda: wrap(process_group=dist.group.WORLD, sharding_strategy=HYBRID_SHARD)
    ),
    "ValueError: Expected the number of ranks of a node to divide all 4 ranks without a "
    "device_mesh, got 3": lambda: in_variable("3"),
    "ValueError: Expected device_id to be a device of this machine, such as cpu, got True": (
        lambda: wrap(device_id=True)
    ),
    "ValueError: Expected device_id to be a device of this machine, such as cpu, got 'xpu:0'": (
        lambda: wrap(device_id="xpu:0")
    ),
    "ValueError: Expected ignored_modules or ignored_states, got both": lambda: ignoring(
        ignored_modules=[], ignored_states=[]
    ),
    "TypeError: Expected ignored_modules to be modules, got str: '0'": lambda: ignoring(
        ignored_modules=["0"]
    ),
    "TypeError: Expected ignored_states to be parameters or modules, got str: '0'": lambda: (
        ignoring(ignored_states=["0"])
    ),
    "ValueError: Expected ignored_states to be parameters or modules, got both kinds mixed": (
        lambda: ignoring(ignored_states=[linear(), linear().weight])
    ),
    "ValueError: Expected ignored modules that are not sharded, got 'FSDPLinear'": lambda: ignoring(
        ignored_modules=[fully_shard(linear())]
    ),
    "ValueError: Expected a module that is not sharded, got FSDPLinear; use it as is": (
        lambda: wrap(fully_shard(linear()))
    ),
    "MaterializationError: Expected Nothing on the meta device to have "
    "reset_parameters(), got none; pass param_init_fn": lambda: wrap(Nothing()),
    "ValueError: Expected a container without parameters of its own, got 'scale' of "
    "Loose, which has no forward to gather it; register it elsewhere": lambda: wrap(Loose()),
    "TypeError: Expected no communication hook on FullyShardedDataParallel, got 'hook'; "
    "call set_all_reduce_hook, set_custom_reduce_scatter or set_custom_all_gather of "
    ".module": lambda: wrap().register_comm_hook(None, "hook"),
}


@pytest.mark.parametrize("text", CASES)
def test_message(text: str) -> None:
    # Without an accelerator, wherever this runs.
    absent = mock.patch.object(torch.accelerator, "current_accelerator", lambda **_: None)
    with fake_ranks(4), absent, pytest.raises(Exception) as caught:
        CASES[text]()
    assert f"{type(caught.value).__name__}: {caught.value}" == text


# All or nothing ----------------------------------------------------------------------------------


def four() -> nn.Module:
    return nn.Linear(4, 4)


def last_gets(**arguments: Any) -> CustomPolicy:
    """Return a policy by which the first of two layers is as it should be."""
    return CustomPolicy(
        lambda module: (module.in_features < 4 or arguments) if hasattr(module, "bias") else False
    )


NO_RESET = (
    "Expected Nothing on the meta device to have reset_parameters(), got none; pass param_init_fn"
)
UNKNOWN = "Expected lambda_fn to return arguments of FSDP, got ['strategy']"
OFFLOAD = "Expected cpu_offload to be a composable_shard.compat.fsdp1.options.CPUOffload, got "
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (four, {"auto_wrap_policy": last_gets(strategy="full")}, UNKNOWN),
    (four, {"auto_wrap_policy": last_gets(cpu_offload=True)}, f"{OFFLOAD}bool: True"),
    (four, {"auto_wrap_policy": 3}, "Expected auto_wrap_policy to be a function, a "),
    (Nothing, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, NO_RESET),
]


@pytest.mark.parametrize(("last", "kwargs", "text"), REFUSED)
def test_what_is_refused_leaves_all_as_it_was(last: Any, kwargs: dict[str, Any], text: str) -> None:
    with fake_ranks(2):
        model = nn.Sequential(nn.Linear(3, 4, device="meta"), last())
        parts = [(part, type(part)) for part in model.modules()]
        params = list(model.named_parameters())
        with pytest.raises((TypeError, ValueError, MaterializationError)) as caught:
            FSDP(model, **{"device_id": "cpu", **kwargs})
        assert str(caught.value).startswith(text)
        assert [(part, type(part)) for part in model.modules()] == parts
        left = model.named_parameters()
        assert all(a == b and p is q for (a, p), (b, q) in zip(left, params, strict=True))
