"""The wrapper: its ranks, what it forwards, its precision, and what it refuses."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
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
    on_all,
    transformer,
    two_of,
    wrap_nested,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable_shard import FSDPModule, MaterializationError, ShardError, fully_shard
from composable_shard.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
)
from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD, HYBRID_SHARD = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD
BF16 = torch.bfloat16


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
        for either in (model, reference):
            either(batch).square().sum().backward()
        average_gradients(reference)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    return model


def wrapped(**kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda module: FSDP(module, device_id=CPU, **kwargs)


def four_ranks() -> list[tuple[Any, ...]]:
    """Return placements and ranks for each way to say which ranks there are."""
    rank, world = dist.get_rank(), dist.group.WORLD
    square = init_device_mesh("cpu", (2, 2))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    pair = (named.get_group("ranks"), named.get_group("nodes"))
    everything = ModuleWrapPolicy({nn.Linear})
    seen = []
    for kwargs in (
        {},
        {"process_group": world, "sharding_strategy": SHARD_GRAD_OP},
        {"device_mesh": init_device_mesh("cpu", (4,)), "auto_wrap_policy": everything},
        {"device_mesh": init_device_mesh("cpu", (4,)), "sharding_strategy": NO_SHARD},
        {"sharding_strategy": NO_SHARD, "auto_wrap_policy": everything},
        {"process_group": pair, "sharding_strategy": HYBRID_SHARD},
        {"device_mesh": square, "sharding_strategy": HYBRID_SHARD},
        {
            "device_mesh": named,
            "sharding_strategy": HYBRID_SHARD,
            "auto_wrap_policy": everything,
        },
    ):
        model = train_as_plain(wrapped(**kwargs))
        param = next(model.parameters())
        assert (model.world_size, model.rank) == (
            (2, rank % 2) if model.sharding_strategy is HYBRID_SHARD else (4, rank)
        )
        seen.append((param.placements, param.device_mesh.shape, param.to_local().shape[0]))
    return seen


def test_the_ranks_may_be_said_in_many_ways() -> None:
    flat = ((Shard(0),), (4,), 2)
    replicated = ((Replicate(),), (4,), 6)
    hybrid = ((Replicate(), Shard(0)), (2, 2), 3)
    assert on_all(four_ranks, 4) == [flat] * 3 + [replicated] * 2 + [hybrid] * 3


def half_of_the_ranks() -> list[int]:
    """Two wrapped models, each over a pair of ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[dist.get_rank() // 2]
    model = FSDP(mlp(), process_group=own, device_id=CPU)
    assert model.process_group.size() == 2
    model(torch.full((1, 4), dist.get_rank() // 2 + 1.0)).sum().backward()
    reference = mlp()
    reference(torch.full((1, 4), dist.get_rank() // 2 + 1.0)).sum().backward()
    assert_same_gradients(model, reference)
    for key, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key])
    return dist.get_process_group_ranks(model.process_group)


def test_a_part_of_the_ranks() -> None:
    assert run_ranks(half_of_the_ranks, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def events_of(strategy: ShardingStrategy) -> list[tuple[str, str]]:
    model = FSDP(
        mlp(),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=CPU,
    )
    batch = torch.ones(2, 4)
    model(batch).sum().backward()
    with record_events(model.module, "all_gather", "reshard", "reduce_scatter") as events:
        model(batch).sum().backward()
    return list(events)


def test_strategies_free_what_they_say() -> None:
    for strategy in (FULL_SHARD, HYBRID_SHARD):
        assert strategy.reshard_after_forward is None
    for strategy in (SHARD_GRAD_OP, NO_SHARD):
        assert strategy.reshard_after_forward is False
    freed, kept = on_all(events_of, 2, FULL_SHARD), on_all(events_of, 2, SHARD_GRAD_OP)
    assert [name for event, name in freed if event == "all_gather"] == ["", "1", "1"]
    assert [name for event, name in kept if event == "all_gather"] == ["", "1"]


def prefetches(prefetch: Any, forward: bool, limit: bool) -> list[tuple[str, str]]:
    model = wrap_nested(
        nested(),
        backward_prefetch=prefetch,
        forward_prefetch=forward,
        limit_all_gathers=limit,
        device_id=CPU,
    )
    batch = model.module.get_input(CPU)
    model(*batch).sum().backward()
    with record_events(model.module) as events:
        model(*batch).sum().backward()
    return list(events)


def test_hints_change_nothing() -> None:
    default = on_all(prefetches, 2, BackwardPrefetch.BACKWARD_PRE, False, True)
    assert default == on_all(prefetches, 2, BackwardPrefetch.BACKWARD_POST, True, False)
    assert default == on_all(prefetches, 2, None, False, False)


# What it forwards -------------------------------------------------------------------------------


def test_names_are_those_of_the_plain_model() -> None:
    with fake_ranks(2):
        plain, reference = two_of(transformer(add_bn=True))
        model = FSDP(plain, auto_wrap_policy=always_wrap_policy, device_id="cpu")
        around, plain_around = nn.Sequential(model), nn.Sequential(reference)
        for ours, theirs in ((model, reference), (around, plain_around)):
            for named in ("named_parameters", "named_buffers"):
                for duplicates in (False, True):
                    assert [n for n, _ in getattr(ours, named)(remove_duplicate=duplicates)] == [
                        n for n, _ in getattr(theirs, named)(remove_duplicate=duplicates)
                    ]
            assert list(dict(ours.named_modules())) == list(dict(theirs.named_modules()))
        assert [n for n, _ in around.named_parameters(prefix="m", recurse=True)] == [
            n for n, _ in plain_around.named_parameters(prefix="m", recurse=True)
        ]


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
    """Edit full parameters of one wrapper and of all, with their gradients."""
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


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(2)
def test_activation_checkpoints(inside: bool) -> None:
    def wrap(module: nn.Module) -> Any:
        layers = module
        if inside:
            layers[1] = FSDP(checkpoint_wrapper(layers[1]), device_id=CPU)
        else:
            layers[1] = checkpoint_wrapper(FSDP(layers[1], device_id=CPU))
        return FSDP(module, device_id=CPU)

    plain, reference = two_of(mlp())
    model = wrap(plain)
    batch = torch.full((2, 4), dist.get_rank() + 1.0)
    for either in (model, reference):
        either(batch).square().sum().backward()
    average_gradients(reference)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)


class Vocabulary(nn.Module):
    """An embedding and an output layer that share a weight, each with a wrapper of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.embed(x)))


@on_ranks(2)
def test_parameters_tied_across_wrappers() -> None:
    plain, reference = two_of(Vocabulary())
    model = FSDP(plain, auto_wrap_policy=always_wrap_policy, device_id=CPU)
    assert len(FSDP.fsdp_modules(model)) == 4
    batch = torch.arange(3) + dist.get_rank()
    for either in (model, reference):
        either(batch).square().sum().backward()
    average_gradients(reference)
    assert_same_gradients(model, reference)


def inner_no_sync() -> list[bool]:
    """Accumulate without sync in one wrapper only."""
    model = wrap_nested(nested(), device_id=CPU)
    inner = model.module.module[1]
    with inner.no_sync():
        model(*model.module.get_input(CPU)).sum().backward()
    return [param.grad.placements[0].is_partial() for param in model.parameters()]


def test_no_sync_of_an_inner_wrapper() -> None:
    # The wrapper holds the second and third of five layers.
    assert on_all(inner_no_sync, 2) == [False] * 2 + [True] * 4 + [False] * 4


class Layers(nn.Module):
    """Calls what is in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:A container without a forward")
@on_ranks(2)
def test_a_container_of_modules_that_are_sharded() -> None:
    plain, reference = two_of(Layers())
    for layer in plain.layers[:2]:
        fully_shard(layer)
    plain.layers = FSDP(plain.layers, device_id=CPU)
    assert plain.layers.process_group is dist.group.WORLD
    assert len(plain.layers.fsdp_groups()) == 3
    batch = torch.full((2, 4), dist.get_rank() + 1.0)
    with plain.layers.no_sync():
        plain(batch).square().sum().backward()
    assert all(param.grad.placements[0].is_partial() for param in plain.parameters())
    plain(batch).square().sum().backward()
    for _ in range(2):
        reference(batch).square().sum().backward()
    average_gradients(reference)
    assert_same_gradients(plain, reference)


@pytest.mark.parametrize("pickles", [False, True])
@on_ranks(2)
def test_copies_of_wrappers_that_were_given_process_groups(pickles: bool) -> None:
    plain, reference = two_of(mlp())
    model = FSDP(
        plain,
        process_group=dist.group.WORLD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        param_init_fn=lambda module: None,
        use_orig_params=True,
        device_id=CPU,
    )
    if pickles:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    else:
        model = copy.deepcopy(model)
    assert model.fsdp_choices.use_orig_params
    batch = torch.full((2, 4), dist.get_rank() + 1.0)
    for either in (model, reference):
        either(batch).square().sum().backward()
    average_gradients(reference)
    assert_same_gradients(model, reference)


# Precision --------------------------------------------------------------------------------------


class Noting(nn.Module):
    """A layer that notes the dtypes of its input, weight and output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        out = self.layer(x)
        self.seen[:] = [x.dtype, weight.dtype, out.dtype]  # type: ignore[union-attr]
        return out


def cast_inputs(root: bool, below: bool) -> list[list[torch.dtype]]:
    """An outer model in bfloat16 whose inner layer is in float64."""
    outer = MixedPrecision(BF16, cast_root_forward_inputs=root)
    inner = MixedPrecision(torch.float64, cast_forward_inputs=below)
    first, second = Noting(nn.Linear(4, 4)), Noting(nn.Linear(4, 4))
    model = FSDP(
        nn.Sequential(first, FSDP(second, mixed_precision=inner, device_id=CPU)),
        mixed_precision=outer,
        device_id=CPU,
    )
    with mock.patch.object(nn.Linear, "forward", lambda self, x: x @ self.weight.to(x.dtype)):
        model(torch.ones(2, 4))
    return [first.seen, second.seen]


def test_who_casts_inputs() -> None:
    single, double = torch.float32, torch.float64
    assert on_all(cast_inputs, 2, True, True) == [[BF16] * 3, [double] * 3]
    assert on_all(cast_inputs, 2, True, False) == [[BF16] * 3, [BF16, double, BF16]]
    assert on_all(cast_inputs, 2, False, False) == [
        [single, BF16, single],
        [single, double, single],
    ]


def exempted(policy: Any, classes: tuple[type[nn.Module], ...]) -> list[list[torch.dtype]]:
    norm = Noting(nn.LayerNorm(4))
    model = FSDP(
        nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4)),
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(BF16, _module_classes_to_ignore=classes),
        device_id=CPU,
    )
    out = model(torch.ones(2, 4))
    out.sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    return [norm.seen, [out.dtype]]


def test_exempt_modules_compute_in_their_own_precision() -> None:
    low, own = [[BF16] * 3, [BF16]], [[BF16, torch.float32, BF16], [BF16]]
    policy = ModuleWrapPolicy({nn.Embedding})
    assert on_all(exempted, 2, policy, ()) == low
    assert on_all(exempted, 2, None, (nn.LayerNorm,)) == low
    assert on_all(exempted, 2, policy, (nn.LayerNorm,)) == own


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


def low_grads(keep: bool) -> set[torch.dtype]:
    precision = MixedPrecision(BF16, keep_low_precision_grads=keep)
    model = FSDP(mlp(), mixed_precision=precision, device_id=CPU)
    model(torch.ones(1, 4)).sum().backward()
    return {param.grad.dtype for param in model.parameters()}


def test_low_precision_gradients_may_be_kept() -> None:
    assert on_all(low_grads, 2, True) == {BF16}
    assert on_all(low_grads, 2, False) == {torch.float32}


def full_precision(variable: str) -> tuple[str, list[torch.dtype]]:
    plain, reference = two_of(mlp().eval())
    os.environ[variable] = "1"
    try:
        model = FSDP(
            plain,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            mixed_precision=MixedPrecision(BF16),
            device_id=CPU,
        )
    finally:
        del os.environ[variable]
    batch = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(model(batch), reference(batch))
        dtypes = [model(batch).dtype, model.train()(batch).dtype]
    model.train()(batch).sum().backward()
    with pytest.raises(ShardError) as caught:
        model.eval()(batch)
    return str(caught.value), dtypes


def test_evaluation_in_full_precision() -> None:
    text = (
        "Expected torch.no_grad() around a forward in evaluation with full precision, got "
        "gradients enabled; or unset COMPOSABLE_SHARD_FULL_PRECISION_IN_EVAL and "
        "FSDP_USE_FULL_PREC_IN_EVAL"
    )
    for name in ("COMPOSABLE_SHARD_FULL_PRECISION_IN_EVAL", "FSDP_USE_FULL_PREC_IN_EVAL"):
        assert on_all(full_precision, 2, name) == (text, [torch.float32, BF16])


def full_precision_of_tied() -> bool:
    plain, reference = two_of(Vocabulary().eval())
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    try:
        model = FSDP(
            plain,
            auto_wrap_policy=always_wrap_policy,
            mixed_precision=MixedPrecision(BF16),
            device_id=CPU,
        )
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    with torch.no_grad():
        return torch.equal(model(torch.arange(3)), reference(torch.arange(3)))


def test_evaluation_in_full_precision_of_parameters_tied_across_wrappers() -> None:
    assert on_all(full_precision_of_tied, 2)


@on_ranks(2)
def test_a_wrapper_of_a_wrapper() -> None:
    def wrap(module: nn.Module) -> Any:
        return FSDP(FSDP(module, device_id=CPU), device_id=CPU)

    model = train_as_plain(wrap)
    assert [wrapper.check_is_root() for wrapper in FSDP.fsdp_modules(model)] == [True, False]
    assert list(model.state_dict()) == list(mlp().state_dict())
    model.load_state_dict(mlp().state_dict())
    assert_same_parameters(model, mlp())


# From the meta device ---------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def materialized(by_function: bool) -> list[float]:
    def init_fn(module: nn.Module) -> None:
        module.to_empty(device=CPU, recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    with torch.device("meta"):
        plain = nn.Sequential(Tied(), nn.Linear(4, 2))
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({Tied}),
        param_init_fn=init_fn if by_function else None,
        sync_module_states=True,
        device_id=CPU,
    )
    tied = model[0].module
    assert tied.first.weight is tied.second.weight
    model(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    return [full(param).sum().item() for param in model.parameters()]


def test_from_the_meta_device() -> None:
    first, second = run_ranks(materialized, 2, False)
    assert first == second
    assert all(total != 0 for total in first)
    assert on_all(materialized, 2, True) == [8, 2, 2, 4, 1]


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


CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: wrap("layer"),
        TypeError,
        "Expected module to be an nn.Module, got str",
    ),
    (
        lambda: wrap(sharding_strategy="FULL_SHARD"),
        TypeError,
        "Expected sharding_strategy to be a composable_shard.compat.fsdp1.policies."
        "ShardingStrategy, got builtins.str",
    ),
    (
        lambda: wrap(use_orig_params=1),
        TypeError,
        "Expected use_orig_params to be a builtins.bool, got builtins.int",
    ),
    (
        lambda: wrap(param_init_fn="init"),
        TypeError,
        "Expected param_init_fn to be callable, got str",
    ),
    (
        lambda: MixedPrecision(cast_forward_inputs=1),  # type: ignore[arg-type]
        TypeError,
        "Expected cast_forward_inputs to be a bool, got 1",
    ),
    # Ranks
    (
        lambda: wrap(process_group=dist.group.WORLD, device_mesh=mesh_of(4)),
        ValueError,
        "Expected process_group or device_mesh, got both; pass one of them",
    ),
    (
        lambda: wrap(device_mesh=mesh_of(2, 2)),
        ValueError,
        "Expected device_mesh to have 1 axis for ShardingStrategy.FULL_SHARD, got 2: "
        "DeviceMesh((2, 2), 'cpu', stride=(2, 1)); pass one axis of it, or a hybrid strategy",
    ),
    (
        lambda: wrap(process_group=(dist.group.WORLD, dist.group.WORLD)),
        ValueError,
        "Expected process_group to be one ProcessGroup for ShardingStrategy.FULL_SHARD, got "
        "tuple; pairs of them are for hybrid strategies",
    ),
    (
        lambda: wrap(device_mesh=mesh_of(4), sharding_strategy=HYBRID_SHARD),
        ValueError,
        "Expected device_mesh to have 2 axes (replicate, shard) for "
        "ShardingStrategy.HYBRID_SHARD, got 1: DeviceMesh((4,), 'cpu', stride=(1,))",
    ),
    (
        lambda: wrap(sharding_strategy=HYBRID_SHARD),
        ValueError,
        "Expected process groups or a device_mesh for ShardingStrategy.HYBRID_SHARD without an "
        "auto_wrap_policy, got none; pass the same ones to all nested wrappers",
    ),
    (
        lambda: wrap(process_group=dist.group.WORLD, sharding_strategy=HYBRID_SHARD),
        ValueError,
        "Expected process_group to be a pair of process groups (shard, replicate) for "
        "ShardingStrategy.HYBRID_SHARD, got ProcessGroup",
    ),
    (
        lambda: in_variable("3"),
        ValueError,
        "Expected the ranks of a node to divide all 4 ranks, got 3; pass a device_mesh of 2 axes "
        "(replicate, shard)",
    ),
    # Devices
    (
        lambda: wrap(device_id=True),
        ValueError,
        "Expected device_id to be a device of this machine, got True without an accelerator; pass "
        "torch.device('cpu')",
    ),
    (
        lambda: wrap(device_id="xpu:0"),
        ValueError,
        "Expected device_id to be a device of this machine, got xpu:0, which is not there",
    ),
    # Ignored
    (
        lambda: ignoring(ignored_modules=[], ignored_states=[]),
        ValueError,
        "Expected ignored_modules or ignored_states, got both; pass ignored_states",
    ),
    (
        lambda: ignoring(ignored_modules=["0"]),
        TypeError,
        "Expected ignored_modules to be modules, got str",
    ),
    (
        lambda: ignoring(ignored_states=["0"]),
        TypeError,
        "Expected ignored_states to be parameters or modules, got str",
    ),
    (
        lambda: ignoring(ignored_states=[linear(), linear().weight]),
        ValueError,
        "Expected ignored_states to be parameters or modules, got both kinds mixed",
    ),
    (
        lambda: ignoring(ignored_modules=[fully_shard(linear())]),
        ValueError,
        "Expected ignored modules that are not sharded, got FSDPLinear",
    ),
    # The rest
    (
        lambda: wrap(fully_shard(linear())),
        ValueError,
        "Expected a module that is not sharded, got FSDPLinear, which fully_shard was applied to "
        "before; wrap the module around it, or use it as it is",
    ),
    (
        lambda: wrap(Nothing()),
        MaterializationError,
        "Expected Nothing on the meta device to have reset_parameters(), got none; pass "
        "param_init_fn",
    ),
    (
        lambda: wrap(Loose()),
        ValueError,
        "Expected a container without parameters of its own, got 'scale' of Loose, which has no "
        "forward to gather it; register it elsewhere",
    ),
    (
        lambda: wrap().register_comm_hook(None, "hook"),
        TypeError,
        "Expected no communication hook on FullyShardedDataParallel, got 'hook'; call "
        "set_all_reduce_hook, set_custom_reduce_scatter or set_custom_all_gather of .module",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_message(call: Callable[[], object], error: type[Exception], text: str) -> None:
    # Without an accelerator, wherever this runs.
    absent = mock.patch.object(torch.accelerator, "current_accelerator", lambda **_: None)
    with fake_ranks(4), absent, pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == text


def test_nothing_is_done_before_arguments_are_checked() -> None:
    module = mlp()
    before = copy.deepcopy(module.state_dict())
    with fake_ranks(4):
        for kwargs in (
            {"device_mesh": mesh_of(2, 2)},
            {"ignored_modules": ["0"]},
            {"cpu_offload": True},
            {"auto_wrap_policy": 3},
        ):
            with pytest.raises((TypeError, ValueError)):
                wrap(module, **{"auto_wrap_policy": always_wrap_policy, **kwargs})
            assert type(module) is nn.Sequential and type(module[1]) is nn.Sequential
            for key, value in module.state_dict().items():
                assert torch.equal(value, before[key])


def test_offload_is_chosen_as_ever() -> None:
    with fake_ranks(2):
        model = wrap(cpu_offload=CPUOffload(offload_params=True))
        assert model.weight.device == CPU


# All or nothing ----------------------------------------------------------------------------------


class Final(nn.Sequential):
    """A class of which no other is made."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no class may be made of Final")


def last_gets(**arguments: Any) -> CustomPolicy:
    """Return a policy by which the first of two layers is as it should be."""
    return CustomPolicy(
        lambda module: (module.in_features < 4 or arguments) if hasattr(module, "bias") else False
    )


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "an argument that there is not": (
        lambda: nn.Linear(4, 4),
        last_gets(strategy="full"),
        "got an unexpected keyword argument 'strategy'",
    ),
    "an argument of another type": (
        lambda: nn.Linear(4, 4),
        last_gets(cpu_offload=True),
        "Expected cpu_offload to be a composable_shard.compat.fsdp1.policies.CPUOffload, got "
        "builtins.bool",
    ),
    "something ignored twice": (
        lambda: nn.Linear(4, 4),
        last_gets(ignored_modules=[]),
        "Expected ignored_modules or ignored_states, got both; pass ignored_states",
    ),
    "a class that cannot be": (
        lambda: Final(nn.Linear(4, 4)),
        ModuleWrapPolicy({nn.Linear, Final}),
        "no class may be made of Final",
    ),
    "a root that cannot be": (
        lambda: Final(nn.Linear(4, 4)),
        ModuleWrapPolicy({nn.Linear}),
        "no class may be made of Final",
    ),
    "nothing to initialize it": (
        Nothing,
        ModuleWrapPolicy({nn.Linear}),
        "Expected Nothing on the meta device to have reset_parameters(), got none; pass "
        "param_init_fn",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_all_as_it_was(case: str) -> None:
    make, policy, text = REFUSED[case]
    with fake_ranks(2):
        model = nn.Sequential(nn.Linear(3, 4, device="meta"), make())
        parts = [(part, type(part)) for part in model.modules()]
        params = list(model.named_parameters())
        root = model[1] if case == "a root that cannot be" else model
        with pytest.raises((TypeError, ValueError, MaterializationError)) as caught:
            FSDP(root, auto_wrap_policy=policy, device_id="cpu")
        assert str(caught.value) == text
        assert [(part, type(part)) for part in model.modules()] == parts
        left = model.named_parameters()
        assert all(a == b and p is q for (a, p), (b, q) in zip(left, params, strict=True))
