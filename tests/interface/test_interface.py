"""What a sharded module is, and what its methods do at any time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nets import Net, assert_trains_alike, full, own_input, shard_net, train_step, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

import composable_shard
from composable_shard import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks


def test_the_class_of_a_sharded_module() -> None:
    with fake_ranks(2):
        model = Net(1)
        assert fully_shard(model.blocks[0]) is model.blocks[0]
        assert fully_shard(model) is model
        for module, original in ((model, Net), (model.blocks[0], type(Net(1).blocks[0]))):
            assert isinstance(module, (FSDPModule, original))
            assert isinstance(module, FSDPModule) and isinstance(module, original)
            assert isinstance(module, TorchFSDPModule)
            assert type(module).__name__ == f"FSDP{original.__name__}"
            assert type(module).__module__ == original.__module__
        assert type(model.inp) is nn.Linear
        assert type(fully_shard(Net(1))) is type(model)
        modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
        assert fully_shard(modules) is modules
        assert all(isinstance(module, FSDPModule) for module in modules)


def test_every_public_method_of_torch_is_overridden() -> None:
    inherited = [
        name
        for name, member in vars(TorchFSDPModule).items()
        if callable(member) and not name.startswith("_") and getattr(FSDPModule, name) is member
    ]
    assert inherited == []


NOT_FSDP2 = {  # what torch.distributed.fsdp has besides
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}


def arguments(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, default_of(p.default)) for p in parameters if p.name != "self"]


def default_of(value: object) -> object:
    """Return what two libraries can both have as a default."""
    return type(value).__name__ if dataclasses.is_dataclass(value) else value


def unlike(ours: Callable[..., object], theirs: Callable[..., object]) -> list[str]:
    """Tell which arguments of a function of torch ours would not take as torch's does.

    Ours may have more with defaults, and name a default of torch's that means the same.
    """
    own = {name: (kind, default) for name, kind, default in arguments(ours)}
    order = [name for name, kind, _ in arguments(ours) if kind != inspect.Parameter.KEYWORD_ONLY]
    found = []
    place = 0
    for name, kind, default in arguments(theirs):
        if name not in own:
            found.append(f"{name}: missing")
            continue
        if kind == inspect.Parameter.POSITIONAL_OR_KEYWORD:
            if place >= len(order) or order[place] != name:
                found.append(f"{name}: not argument {place}")
            place += 1
        if own[name][1] != default and (name, default) not in SAME_DEFAULTS:
            found.append(f"{name}: default {own[name][1]}, not {default}")
    of_torch = {name for name, _, _ in arguments(theirs)}
    empty = inspect.Parameter.empty
    found += [f"{n}: needed" for n, (_, d) in own.items() if n not in of_torch and d is empty]
    return found


SAME_DEFAULTS = {  # made in the call here, so that a signature shows no object
    ("mp_policy", "MixedPrecisionPolicy"),
    ("offload_policy", "OffloadPolicy"),
}


def public_names_of_torch() -> list[str]:
    return sorted(set(torch_fsdp.__all__) - NOT_FSDP2)


def test_what_torch_exports_is_exported() -> None:
    names = public_names_of_torch()
    assert {"fully_shard", "FSDPModule", "MixedPrecisionPolicy", "UnshardHandle"} <= set(names)
    assert [name for name in names if name not in composable_shard.__all__] == []


@pytest.mark.parametrize("name", public_names_of_torch())
def test_arguments_are_those_of_torch(name: str) -> None:
    ours, theirs = getattr(composable_shard, name), getattr(torch_fsdp, name)
    if not inspect.isclass(theirs):
        assert unlike(ours, theirs) == []
        return
    if dataclasses.is_dataclass(theirs):
        assert unlike(ours, theirs) == []
    methods = [
        method
        for method, member in vars(theirs).items()
        if inspect.isfunction(member) and not method.startswith("_")
    ]
    found = {method: unlike(getattr(ours, method), getattr(theirs, method)) for method in methods}
    assert {method: differences for method, differences in found.items() if differences} == {}


def clear_by_module(model: nn.Module, set_to_none: bool) -> None:
    model.zero_grad(set_to_none=set_to_none)


def clear_by_optimizer(model: nn.Module, set_to_none: bool) -> None:
    model.reshard()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)


def clear_by_reset(model: nn.Module, set_to_none: bool) -> None:
    model.reset_iter_state()


Clear = Callable[[nn.Module, bool], None]


@pytest.mark.parametrize("clear", [clear_by_module, clear_by_optimizer, clear_by_reset])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_accumulated_gradients_are_cleared(clear: Clear, set_to_none: bool) -> None:
    reference, model = two_nets(2)
    with model.no_sync():
        model(own_input(5)).square().sum().backward()
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor) and param.grad.placements[0].is_partial(), name
    clear(model, set_to_none)
    for param in model.parameters():
        assert param.grad is None or not full(param.grad).any()
    assert_trains_alike(model, reference)


def accumulated(reduce_dtype: torch.dtype | None) -> None:
    """An accumulated gradient is this rank's sum, whose mean over the ranks is the gradient."""
    reference, model = two_nets(1, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with model.no_sync(), model.no_sync():
        for step in range(2):
            model(own_input(step)).square().sum().backward()
            reference(own_input(step)).square().sum().backward()
    for name, param in model.named_parameters():
        own = reference.get_parameter(name).grad
        assert param.grad.shape == param.shape
        assert param.grad.dtype == (reduce_dtype or torch.float32)
        torch.testing.assert_close(param.grad.to_local(), own.to(param.grad.dtype))
        mean = own.to(param.grad.dtype, copy=True)
        dist.all_reduce(mean)
        torch.testing.assert_close(param.grad.full_tensor(), mean / dist.get_world_size())
    train_step(model, 2, None)
    train_step(reference, 2, None)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6)
        assert param.grad.placements == param.placements


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_accumulated_gradients_are_visible_as_partial(reduce_dtype: torch.dtype | None) -> None:
    run_ranks(accumulated, 2, reduce_dtype)


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("recurse", [False, True])
@on_ranks(2)
def test_sync_may_be_set_before_and_after_forward(after_forward: bool, recurse: bool) -> None:
    model = shard_net(Net(2))
    loss = None
    if after_forward:
        loss = model(own_input()).sum()
    model.set_requires_gradient_sync(False, recurse=recurse)
    with record_events(model, "accumulate", "reduce_scatter") as first:
        (model(own_input()).sum() if loss is None else loss).backward()
    model.set_requires_gradient_sync(True, recurse=recurse)
    with record_events(model, "accumulate", "reduce_scatter") as second:
        model(own_input()).sum().backward()
    below = "accumulate" if recurse else "reduce_scatter"
    expected = [
        [f"{below} blocks.1", f"{below} blocks.0", "accumulate "],
        ["reduce_scatter blocks.1", "reduce_scatter blocks.0", "reduce_scatter "],
    ]
    assert ([[f"{event} {name}" for event, name in part] for part in (first, second)]) == (expected)


@on_ranks(2)
def test_no_sync_restores_what_was_set() -> None:
    _, model = two_nets(1)
    block = model.blocks[0]
    block.set_requires_gradient_sync(False)
    with model.no_sync():
        pass
    model(own_input()).square().sum().backward()
    partial = [p.grad.placements[0].is_partial() for p in (block.up.weight, model.inp.weight)]
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    train_step(model, 1, None)
    partial += [p.grad.placements[0].is_partial() for p in (block.up.weight, model.inp.weight)]
    assert (partial) == ([True, False, True, False])


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_unshard_handles() -> None:
    reference, model = two_nets(1)
    block = model.blocks[0]
    pending = block.unshard(async_op=True)
    assert isinstance(pending, UnshardHandle)
    assert isinstance(block.up.weight, DTensor)
    pending.wait()
    assert torch.equal(block.up.weight, reference.blocks[0].up.weight)
    assert block.unshard() is None
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    dropped = block.unshard(async_op=True)
    block.reshard()
    dropped.wait()  # nothing to wait for any more
    assert isinstance(block.up.weight, DTensor)
    assert torch.equal(model(own_input()), reference(own_input()))
