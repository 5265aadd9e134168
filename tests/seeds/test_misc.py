"""Small promises of the wrapper: devices, unused layers, outputs, ignored modules, warnings.

Each test is named after that of the document. What only CUDA can show is marked so; the test after
it, which ends in ``on_cpu``, has the same fact without a device.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections import namedtuple
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.common_fsdp import MLP

from composable_shard import MaterializationError, _torch
from composable_shard.compat.fsdp1 import (
    CPUOffload,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    transformer_auto_wrap_policy,
)
from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.compat.fsdp1.construction import resolve_device, scope_of, stays_on_cpu
from composable_shard.compat.fsdp1.options import Choices
from composable_shard.testing import fake_ranks
from seeds.models import (
    CPU,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    full,
    gpu,
    nested,
    pretend_cuda,
    pretend_on,
    pretend_param,
    transformer,
    wrap_nested,
    wrap_parts,
)

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD = ShardingStrategy.NO_SHARD
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]


class TwoLayers(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x + y))


class TwoOutputs(TwoLayers):
    """Uses the second layer if it is told to."""

    def __init__(self, width: int, use_second_layer: bool = True) -> None:
        super().__init__(width)
        self.use_second_layer = use_second_layer

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return (self.a(x), self.b(y)) if self.use_second_layer else self.a(x)


def two_places(first: str, second: str) -> TwoLayers:
    model = TwoLayers(1)
    model.a, model.b = model.a.to(first), model.b.to(second)
    return model


def device_of(module: nn.Module, **kwargs: Any) -> torch.device:
    """Return where a wrapper with these arguments would compute."""
    return resolve_device(scope_of(module, None, None), Choices(**kwargs))


# device_id --------------------------------------------------------------------------------------


@gpu()
@pytest.mark.parametrize("use_index", [True, False])
def test_fsdp_device_id(use_index: bool) -> None:
    """the index of a device"""
    current = torch.device("cuda", torch.cuda.current_device())
    with fake_ranks(2):
        device_id = current.index if use_index else current
        models = [wrap_parts(nested(start), device_id=device_id) for start in (CPU, current)]
        with pytest.warns(UserWarning, match="does not have an explicit index"):
            models.append(wrap_parts(nested(current), device_id=torch.device("cuda")))
    for model in models:
        wrapped = [p for m in FSDP.fsdp_modules(model) for p in m.parameters()]
        assert {param.device for param in wrapped} == {current}


def test_fsdp_device_id_on_cpu() -> None:
    with fake_ranks(2):
        for device_id in ("cpu", CPU):
            model = wrap_parts(nested(), device_id=device_id)
            for wrapper in FSDP.fsdp_modules(model):
                assert wrapper.compute_device == CPU
                assert {param.device for param in wrapper.parameters()} == {CPU}


@pytest.mark.parametrize("index", [0, 1])
def test_fsdp_device_id_index_on_cpu(index: int) -> None:
    current = torch.device("cuda", index)
    with fake_ranks(2, rank=1), pretend_cuda(index), warnings.catch_warnings():
        warnings.simplefilter("error")
        for device_id in (index, current, f"cuda:{index}"):
            assert device_of(nn.Linear(2, 2), device_id=device_id) == current
            there = pretend_on(f"cuda:{index}", nn.Linear(2, 2))
            assert device_of(there, device_id=device_id) == current
        with pytest.warns(UserWarning) as caught:
            assert device_of(there, device_id=torch.device("cuda")) == current
    assert [str(warning.message) for warning in caught] == [
        f"device_id cuda of rank 1 does not have an explicit index: the current device, {current}, "
        "is used; pass it, or set another device first"
    ]


@gpu(2)
def test_module_device_mismatches_device_id() -> None:
    """two devices"""
    torch.cuda.set_device(1)
    try:
        with fake_ranks(2, rank=1):
            model = nested(torch.device("cuda", 1))
            with pytest.raises(ValueError, match="cuda:1 vs cuda:0"):
                wrap_parts(model, device_id=0)
    finally:
        torch.cuda.set_device(0)


def refused(module: nn.Module, kind: type[Exception] = ValueError, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        FSDP(module, **kwargs)
    return str(caught.value)


def test_module_device_mismatches_device_id_on_cpu() -> None:
    model = pretend_on("cuda:1", nn.Linear(2, 2))
    for current, device_id in ((1, 0), (0, None), (0, 1)):
        with fake_ranks(2, rank=1), pretend_cuda(current):
            asked = None if device_id is None else f"cuda:{device_id}"
            assert refused(model, device_id=device_id) == (
                "Expected the module of rank 1, and device_id, on its current device "
                f"cuda:{current}, or the module on the CPU, got cuda:1 vs {asked}; call "
                "torch.accelerator.set_device_index first"
            )


@gpu()
def test_cpu_gpu_module() -> None:
    """a CPU and a device at once"""
    with fake_ranks(2):
        current = torch.device("cuda", torch.cuda.current_device())
        model = FSDP(two_places("cuda", "cpu"), device_id=current.index)
        assert {param.device for param in model.parameters()} == {current}
        with pytest.raises(RuntimeError, match="please pass in device_id"):
            FSDP(two_places("cuda", "cpu"))


def test_cpu_gpu_module_on_cpu() -> None:
    model = two_places("cpu", "cpu")
    pretend_on("cuda:0", model.a)
    with fake_ranks(2), pretend_cuda():
        assert device_of(model, device_id=0) == torch.device("cuda", 0)
        assert refused(model, RuntimeError) == (
            "Expected a module on a single device, got parameters on ['cpu', 'cuda:0']; wrap its "
            "parts one by one, or, if only some are on the CPU, please pass in device_id"
        )


@gpu(2)
def test_multigpu_module() -> None:
    """two devices"""
    with fake_ranks(2), pytest.raises(RuntimeError, match="single device"):
        FSDP(two_places("cuda:0", "cuda:1"))


def test_multigpu_module_on_cpu() -> None:
    model = two_places("cpu", "cpu")
    pretend_on("cuda:0", model.a)
    pretend_on("cuda:1", model.b)
    with fake_ranks(2), pretend_cuda():
        text = refused(model, RuntimeError)
    assert text == (
        "Expected a module on a single device, got parameters on ['cuda:0', 'cuda:1']; wrap its "
        "parts one by one, or, if only some are on the CPU, please pass in device_id"
    )


def test_device_id_auto_wrap() -> None:
    classes = {TransformerEncoderLayer, TransformerDecoderLayer}
    with fake_ranks(2):
        for policy in (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
            ModuleWrapPolicy(classes),
        ):
            model = FSDP(transformer(), auto_wrap_policy=policy, device_id=CPU)
            wrappers = FSDP.fsdp_modules(model)
            assert [type(w.module).__name__ for w in wrappers] == [
                "FSDPTransformerWithSharedParams",
                *["FSDPTransformerEncoderLayer"] * 2,
                *["FSDPTransformerDecoderLayer"] * 2,
            ]
            assert [wrapper.compute_device for wrapper in wrappers] == [CPU] * 5


@gpu()
@pytest.mark.parametrize("use_callable", [False, True])
def test_device_id_auto_wrap_on_gpu(use_callable: bool) -> None:
    """the index of a device"""
    classes = {TransformerEncoderLayer, TransformerDecoderLayer}
    policy: Any = ModuleWrapPolicy(classes)
    if use_callable:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    with fake_ranks(2):
        current = torch.device("cuda", torch.cuda.current_device())
        model = FSDP(transformer(current), auto_wrap_policy=policy, device_id=current.index)
        assert {w.compute_device for w in FSDP.fsdp_modules(model)} == {current}


def offloaded(device: torch.device, use_orig_params: bool) -> tuple[Any, nn.Module]:
    layers = [nn.Linear(10, 10) for _ in range(3)]
    plain = nn.Sequential(nn.Sequential(*layers[:2]), layers[2])
    reference = copy.deepcopy(plain)
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        cpu_offload=CPUOffload(offload_params=True),
        device_id=device,
        use_orig_params=use_orig_params,
    )
    assert len(FSDP.fsdp_modules(model)) == 2
    assert len(list(model.parameters())) == 6
    assert {full(param).shape for param in model.parameters()} == {(10, 10), (10,)}
    assert {param.device for param in model.parameters()} == {CPU}
    return model, reference


@gpu()
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp_device_id_cpu_offload(use_orig_params: bool) -> None:
    """shards on the CPU, compute elsewhere"""
    with fake_ranks(1):
        current = torch.device("cuda", torch.cuda.current_device())
        model, _ = offloaded(current, use_orig_params)
        assert model(torch.ones(2, 10)).device == current


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_fsdp_device_id_cpu_offload_on_cpu(use_orig_params: bool) -> None:
    model, reference = offloaded(CPU, use_orig_params)
    batch = torch.randn(2, 10, generator=torch.Generator().manual_seed(dist.get_rank()))
    for trained in (model, reference):
        trained(batch).square().sum().backward()
    average_gradients(reference)
    assert_same_gradients(model, reference)
    assert {param.grad.device for param in model.parameters()} == {CPU}


# Modules on the CPU -----------------------------------------------------------------------------


@gpu()
def test_fsdp_cpu_init_stays_on_cpu() -> None:
    """a module on the CPU, compute elsewhere"""
    with fake_ranks(1):
        with pytest.warns(UserWarning, match="module is on CPU"):
            model = FSDP(wrap_parts(nested()))
        assert {param.device for param in model.parameters()} == {CPU}
        model = model.cuda()
        loss = model(*model.module.get_input(device=CPU)).sum()
        assert loss.is_cuda
        loss.backward()
        assert all(param.grad.is_cuda for param in model.parameters())


def test_fsdp_cpu_init_stays_on_cpu_on_cpu() -> None:
    scope, cuda = scope_of(nn.Linear(2, 2), None, None), torch.device("cuda", 0)
    text = "The module is on CPU and stays there: move it to cuda:0 before training, or pass "
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert stays_on_cpu(scope, Choices(), cuda)
        assert not stays_on_cpu(scope, Choices(device_id=0), cuda)
        assert not stays_on_cpu(scope, Choices(cpu_offload=CPUOffload(offload_params=True)), cuda)
    assert [str(one.message) for one in caught] == [f"{text}device_id to have it moved now"]
    with fake_ranks(1):  # compute is on the CPU too
        model = wrap_nested(nested(), device_id=CPU, sharding_strategy=NO_SHARD)
    assert {param.device for param in model.parameters()} == {CPU}
    assert model(torch.ones(1, 8)).device == CPU


class WithBuffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        nn.init.constant_(self.layers[0].weight, rank + 1)
        self.register_buffer("buf", torch.ones(2, 2) * rank)
        self.layers[0].register_buffer("buf", torch.ones(3, 2) * rank)


@on_ranks(2)
def test_cpu_init_with_sync_module_states() -> None:
    model = FSDP(
        WithBuffers(dist.get_rank()),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=CPU,
        sync_module_states=True,
    )
    assert torch.equal(model.buf, torch.zeros(2, 2))
    assert torch.equal(model.module.layers[0].buf, torch.zeros(3, 2))
    assert torch.equal(full(model.layers[0].weight), torch.ones(3, 2))
    scope = scope_of(WithBuffers(0), None, None)
    with pytest.raises(ValueError) as caught:
        stays_on_cpu(scope, Choices(sync_module_states=True), torch.device("cuda", 0))
    assert str(caught.value) == (
        "Expected parameters and buffers on cuda:0 to synchronize them, got some on the CPU; pass "
        "device_id, or move the module first"
    )


@gpu()
def test_cpu_init_with_sync_module_states_on_gpu() -> None:
    """a module on the CPU, compute elsewhere"""
    with fake_ranks(1):
        with pytest.raises(ValueError, match="got some on the CPU"):
            FSDP(WithBuffers(0), sync_module_states=True)
        current = torch.device("cuda", torch.cuda.current_device())
        model = FSDP(WithBuffers(0), sync_module_states=True, device_id=current)
        assert [buffer.device for buffer in model.buffers()] == [current] * 2


# Layers and outputs without a gradient ----------------------------------------------------------


@pytest.mark.parametrize("use_second_layer", [True, False])
@pytest.mark.parametrize("sharding_strategy", [NO_SHARD, None])
@on_ranks(2)
def test_fsdp_module_no_compute_grad(
    use_second_layer: bool, sharding_strategy: ShardingStrategy | None
) -> None:
    reference = TwoOutputs(10, use_second_layer)
    model = FSDP(
        copy.deepcopy(reference),
        sharding_strategy=sharding_strategy,
        auto_wrap_policy=always_wrap_policy,
        device_id=CPU,
    )
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(10, 10), torch.randn(10, 10)
    for _ in range(4):
        for trained in (model, reference):
            trained.zero_grad()
            out = trained(x, y)
            (out[0] if use_second_layer else out).sum().backward()
        average_gradients(reference)
        assert model.module.a.weight.grad is not None
        assert model.module.b.weight.grad is None
        assert_same_gradients(model, reference)


def watch_weights(module: nn.Module) -> list[torch.Tensor]:
    """Return a list of what the weights of the layers are in the last forward."""
    seen: list[torch.Tensor] = []
    for layer in (module.a, module.b):
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    return seen


def assert_resharded(module: nn.Module, seen: list[torch.Tensor], strategy: object) -> None:
    """Assert that parameters are shards again, and that what was gathered is freed."""
    assert len(seen) == 2
    for param, computed in zip((module.a.weight, module.b.weight), seen, strict=True):
        assert isinstance(param, DTensor) and not isinstance(computed, DTensor)
        local = param.to_local()
        if strategy is NO_SHARD:
            assert computed.data_ptr() == local.data_ptr()
        else:
            assert computed.untyped_storage().size() == 0
            assert local.untyped_storage().size() > 0
    seen.clear()


@pytest.mark.parametrize("sharding_strategy", STRATEGIES)
@on_ranks(2)
def test_fsdp_not_all_outputs_used_in_loss(sharding_strategy: ShardingStrategy) -> None:
    local = TwoOutputs(4)
    wrap = functools.partial(FSDP, sharding_strategy=sharding_strategy, device_id=CPU)
    model = copy.deepcopy(local)
    seen = watch_weights(model)
    model.a = wrap(model.a)
    model = wrap(model)
    assert_same_parameters(model, local)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, local)]
    for step in range(6):
        before = [param.clone() for param in local.parameters()]
        for trained in (model, local):
            a, b = trained(torch.ones(4), torch.ones(4))
            ((a @ b).sum() if step < 2 else a.sum()).backward()
        assert_resharded(model.module, seen, sharding_strategy)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(model, local)
        assert any(not torch.equal(p, q) for p, q in zip(before, local.parameters(), strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()


FourTensors = namedtuple("FourTensors", ["a", "b", "c", "d"])


class Passing(nn.Linear):
    def forward(self, x: FourTensors) -> FourTensors:  # type: ignore[override]
        return FourTensors(x.a, super().forward(x.b), x.c, x.d)


@on_ranks(2)
def test_fsdp_namedtuple() -> None:
    model = FSDP(Passing(10, 10), device_id=CPU, sharding_strategy=FULL_SHARD)
    reference = nn.Linear(10, 10)
    with FSDP.summon_full_params(model):
        reference.load_state_dict(model.module.state_dict())
    out = model(FourTensors(*(torch.ones(1, 10, requires_grad=True) for _ in range(4))))
    assert type(out) is FourTensors
    assert all(tensor._backward_hooks for tensor in out)
    sum(tensor.sum() for tensor in out).backward()
    reference(torch.ones(1, 10)).sum().backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    torch.testing.assert_close(full(model.module.weight.grad), reference.weight.grad)


# Training on the CPU ----------------------------------------------------------------------------


def cpu_training(strategy: ShardingStrategy) -> Any:
    group = dist.group.WORLD
    torch.manual_seed(42)
    model = TwoLayers()
    reference = DDP(copy.deepcopy(model), process_group=group)
    model = FSDP(
        model,
        process_group=None if "HYBRID" in strategy.name else group,
        sharding_strategy=strategy,
        auto_wrap_policy=always_wrap_policy,
        device_id=CPU,
    )
    assert model.sharding_strategy is strategy
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (reference, model)]
    torch.manual_seed(42 + dist.get_rank())
    batch = torch.randn(2, 2)
    for _ in range(10):
        losses = []
        for trained, optimizer in zip((reference, model), optimizers, strict=True):
            loss = trained(batch, batch).sum()
            losses.append(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0], losses[1])
    assert_same_parameters(model, reference.module)
    return model


@pytest.mark.parametrize("strategy", ShardingStrategy)
@on_ranks(2)
def test_fsdp_cpu_training(strategy: ShardingStrategy) -> None:
    cpu_training(strategy)


@pytest.mark.parametrize("strategy", [s for s in ShardingStrategy if "HYBRID" in s.name])
@on_ranks(4)
def test_fsdp_cpu_training_on_two_nodes(strategy: ShardingStrategy) -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        model = cpu_training(strategy)
    assert (model.world_size, model.rank) == (2, dist.get_rank() % 2)


# Optimizers in backward -------------------------------------------------------------------------


def in_backward(register_hook: bool, use_orig_params: bool) -> None:
    reference = TwoLayers()
    model = FSDP(
        copy.deepcopy(reference),
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=use_orig_params,
        device_id=CPU,
    )
    _apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.03}, register_hook=register_hook
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.03)
    batch = torch.randn(10, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        for trained in (model, reference):
            trained(batch, batch).sum().backward()
        average_gradients(reference)
        optimizer.step()
        optimizer.zero_grad()
        assert [param.grad for param in model.parameters()] == [None] * 4
        assert_same_parameters(model, reference)


@on_ranks(2)
def test_fsdp_optim_overlap_no_use_orig_params_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        in_backward(register_hook=False, use_orig_params=False)
    assert str(caught.value) == (
        "Expected no optimizer in backward, got one for 'weight' of group 'a', which is only "
        "supported with use_orig_params=True"
    )


@pytest.mark.parametrize("register_hook", [False, True])
@on_ranks(2)
def test_fsdp_optim_overlap_with_use_orig_params(register_hook: bool) -> None:
    in_backward(register_hook, True)


# Ignored modules --------------------------------------------------------------------------------


class Ignoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.b = nn.Linear(1, 1)
        self.a.register_buffer("buf", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) + self.a.buf)


def ignored_meta(device: torch.device) -> None:
    for init_fn in (None, lambda m: m.to_empty(device=device, recurse=False)):
        with torch.device("meta"):
            module = Ignoring()
        model = FSDP(
            module,
            device_id=device,
            ignored_modules=[module.a],
            use_orig_params=True,
            param_init_fn=init_fn,
        )
        assert {param.device.type for param in model.a.parameters()} == {"meta"}
        assert model.a.buf.device.type == "meta"
        assert {param.device for param in model.b.parameters()} == {device}
        assert all(isinstance(param, DTensor) for param in model.b.parameters())


def test_fsdp_ignored_module_meta() -> None:
    with fake_ranks(2):
        ignored_meta(CPU)


@gpu()
def test_fsdp_ignored_module_meta_on_gpu() -> None:
    """the index of a device"""
    with fake_ranks(2):
        ignored_meta(torch.device("cuda", torch.cuda.current_device()))


@gpu()
def test_fsdp_device_id_no_move_ignored_params_and_bufs() -> None:
    """a module on the CPU, compute elsewhere"""
    with fake_ranks(2):
        module = Ignoring()
        model = FSDP(module, device_id=0, ignored_modules=[module.a], use_orig_params=True)
        assert {t.device for t in (*model.a.parameters(), *model.a.buffers())} == {CPU}
        assert all(param.is_cuda for param in model.b.parameters())


@on_ranks(2)
def test_fsdp_device_id_no_move_ignored_params_and_bufs_on_cpu() -> None:
    module = Ignoring()
    reference = copy.deepcopy(module)
    own = [*module.a.parameters(), *module.a.buffers()]
    model = FSDP(module, device_id=CPU, ignored_modules=[module.a], use_orig_params=True)
    assert all(
        x is y for x, y in zip(own, (*model.a.parameters(), *model.a.buffers()), strict=True)
    )
    batch = torch.full((2, 1), dist.get_rank() + 1.0)
    for trained in (model, reference):
        trained(batch).sum().backward()
    for param, expected in zip(model.a.parameters(), reference.a.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)  # of this rank: nobody reduces it
    average_gradients(reference)
    for param, expected in zip(model.b.parameters(), reference.b.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)


# Modules without parameters, with rank 0's values, of several kinds -----------------------------


def test_no_params() -> None:
    with fake_ranks(2):
        for device_id in (None, CPU):
            model = FSDP(nn.ReLU(), device_id=device_id)
            assert list(model.parameters()) == []
        model = FSDP(nn.ReLU(), device_id=CPU)
        x = torch.tensor([-1.0, 2.0], requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [0, 1]
    with fake_ranks(2, rank=1), pretend_cuda(1), pytest.raises(ValueError) as caught:
        FSDP(nn.ReLU(), device_id=0)
    assert "device_id, on its current device cuda:1" in str(caught.value)


@gpu()
def test_no_params_on_gpu() -> None:
    """the index of a device"""
    with fake_ranks(2):
        for model in (
            FSDP(nn.ReLU()),
            FSDP(nn.ReLU().cuda()),
            FSDP(nn.ReLU(), device_id=torch.cuda.current_device()),
        ):
            assert model(torch.ones(2)).is_cuda


class OwnValues(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.lin = nn.Linear(10, 10, bias=False)
        self.register_buffer("buffer", torch.ones(1) * rank)


def check_same_model(**kwargs: Any) -> None:
    """Synchronize; all ranks then have what rank 0 had."""
    mine, firsts = OwnValues(dist.get_rank()), OwnValues(0)
    is_same = dist.get_rank() == 0
    assert torch.equal(mine.lin.weight, firsts.lin.weight) is is_same
    model = FSDP(mine, sync_module_states=True, device_id=CPU, **kwargs)
    with FSDP.summon_full_params(model):
        for name, value in firsts.state_dict().items():
            assert torch.equal(dict(model.state_dict())[name], value), name


@on_ranks(2)
def test_fsdp_same_model_across_ranks() -> None:
    check_same_model()


@on_ranks(4)
def test_fsdp_same_model_across_ranks_of_two_nodes() -> None:
    hybrid, policy = ShardingStrategy.HYBRID_SHARD, always_wrap_policy
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        check_same_model(sharding_strategy=hybrid, auto_wrap_policy=policy)


EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"


@pytest.mark.parametrize("name", ["use_orig_params", "limit_all_gathers", EVAL])
@on_ranks(2)
def test_homogeneous_attributes(name: str) -> None:
    model = nested()
    inner, outer = ({}, {}) if name == EVAL else ({name: False}, {name: True})
    with mock.patch.dict(os.environ, {EVAL: "0"}):
        model.module[1] = FSDP(model.module[1], device_id=CPU, **inner)
    with mock.patch.dict(os.environ, {EVAL: str(int(name == EVAL))}):
        model = FSDP(model, device_id=CPU, **outer)
    with pytest.raises(ValueError) as caught:
        model(*model.module.get_input(CPU))
    said = "full_precision_in_eval" if name == EVAL else name
    assert str(caught.value) == (
        f"Expected one homogeneous value for {said} in nested wrappers, got [False, True]"
    )


@on_ranks(2)
def test_fsdp_unsupported_module_cls() -> None:
    for wrapped in (
        nn.ModuleList([MLP(8, CPU) for _ in range(3)]),
        nn.ModuleDict({"1": MLP(8, CPU), "2": MLP(8, CPU)}),
    ):
        reference, kind = copy.deepcopy(wrapped), type(wrapped).__name__
        with pytest.warns(UserWarning) as caught:
            model = FSDP(wrapped, device_id="cpu")
        assert [str(warning.message) for warning in caught] == [
            f"{kind} has no forward, so it cannot gather the parameters in it: calls of its "
            "modules gather them; wrap these modules one by one"
        ]
        keys = range(3) if isinstance(reference, nn.ModuleList) else reference
        outs = []
        for trained in (model, reference):
            x = torch.ones(2, 8) * (dist.get_rank() + 1)
            for key in keys:
                x = trained[key](x)
            outs.append(x)
            x.sum().backward()
        assert torch.equal(outs[0], outs[1])
        average_gradients(reference)
        assert_same_gradients(model, reference)


# One rank ---------------------------------------------------------------------------------------


def test_world_size_1_sharding_strategy_warning() -> None:
    for kwargs, said in (
        ({"sharding_strategy": NO_SHARD}, None),
        ({"sharding_strategy": FULL_SHARD}, FULL_SHARD),
        ({}, FULL_SHARD),
        ({"sharding_strategy": SHARD_GRAD_OP}, SHARD_GRAD_OP),
    ):
        with fake_ranks(1), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = FSDP(nn.Linear(3, 3), device_id=CPU, **kwargs)
        assert model.sharding_strategy is NO_SHARD
        text = f"One rank uses `NO_SHARD` instead of {said}"
        assert [str(warning.message) for warning in caught] == ([text] if said else [])


def mismatch(wanted: object, got: object, remedy: str) -> str:
    return (
        f"Expected the parameters of the root group on {wanted}, got weight on {got}, bias on "
        f"{got}; {remedy}"
    )


OFFLOADED = "leave the module on cpu, because its policy offloads it"


@gpu()
def test_training_device_mismatch_errors() -> None:
    """shards on another device than compute"""
    current = torch.device("cuda", torch.cuda.current_device())
    call = f"call module.to('{current}') before training"
    with fake_ranks(1):
        plain = FSDP(nn.Linear(10, 10))
        offloaded = FSDP(nn.Linear(10, 10), cpu_offload=CPUOffload(offload_params=True))
        for model, text in (
            (plain, mismatch(current, "cpu", call)),
            (offloaded.to(current), mismatch("cpu", current, OFFLOADED)),
        ):
            with pytest.raises(RuntimeError) as caught:
                model(torch.randn(2, 10))
            assert str(caught.value) == text


@pytest.mark.parametrize("offload", [False, True])
def test_training_device_mismatch_errors_on_cpu(offload: bool) -> None:
    remedy = OFFLOADED if offload else "call module.to('cpu') before training"
    with fake_ranks(1):
        model = FSDP(nn.Linear(10, 10), cpu_offload=CPUOffload(offload), device_id=CPU)
        for param in model.parameters():
            _torch.set_local_tensor(param, pretend_param("cuda:0", param.to_local()).detach())
        with pytest.raises(MaterializationError) as caught:
            model(torch.randn(2, 10))
    assert str(caught.value) == mismatch("cpu", "cuda:0", remedy)


class Telling(nn.Module):
    """A layer that notes which of its attributes are set."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.__dict__["told"] = []
        self.weight = nn.Parameter(torch.randn(in_dim, out_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("told", []).append(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks("num_ranks")
def test_unsafe_setattr(use_orig_params: bool) -> None:
    for value, expected in ((None, ["weight"] * 2), ("1", []), ("0", ["weight"] * 2)):
        with mock.patch.dict(
            os.environ, {} if value is None else {"FSDP_USE_UNSAFE_SETATTR": value}
        ):
            model = FSDP(Telling(5, 5), use_orig_params=use_orig_params, device_id=CPU)
        model.module.told.clear()
        model(torch.randn(8, 5)).sum().backward()
        assert model.module.told == expected
