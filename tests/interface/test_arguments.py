"""What public functions say of arguments of wrong types: which, what was expected, what came."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from composable_shard import (
    DataParallelMeshDims,
    FSDPModule,
    ShardedGradScaler,
    ShardPlacementResult,
    clip_grad_norm_,
    estimate,
    explain,
    fully_shard,
    iter_full,
    load_sharded,
    move,
    parked,
    register_fsdp_forward_method,
    save_full,
    share_comm_ctx,
    sync_module_states,
    trace,
    uneven,
    unsharded,
    weigh,
)
from composable_shard.insight.events import record_events
from composable_shard.optim import flat, with_layout
from composable_shard.testing import fake_ranks


def sharded() -> Any:
    return fully_shard(nn.Linear(4, 4))


def with_gradients() -> Any:
    module = sharded()
    module(torch.ones(2, 4)).sum().backward()
    return module


def open_trace(**kwargs: Any) -> None:
    with trace(**{"module": sharded(), **kwargs}):
        raise AssertionError("must not get here")


def open_events(module: Any) -> None:
    with record_events(module):
        raise AssertionError("must not get here")


def told(**kwargs: Any) -> None:
    estimate(**{"build_model": nn.Identity, "mesh_shape": 2, "batch": torch.ones(1), **kwargs})


def call(function: Any, *args: Any, **kwargs: Any) -> None:
    """Call a function, and enter what it returns if that is a context."""
    made = function(*args, **kwargs)
    if hasattr(made, "__enter__"):
        with made:
            raise AssertionError("must not get here")


any_of: Any = fully_shard  # to be called with what type checkers refuse
any_dims: Any = DataParallelMeshDims
any_placement: Any = ShardPlacementResult
any_scaler: Any = ShardedGradScaler
any_clip: Any = clip_grad_norm_
any_uneven: Any = uneven
any_weigh: Any = weigh
any_explain: Any = explain
any_share: Any = share_comm_ctx
any_register: Any = register_fsdp_forward_method
any_sync: Any = sync_module_states

TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "placement function": (
        lambda: any_of(nn.Linear(4, 4), shard_placement_fn=Shard(0)),
        "shard_placement_fn to be a function of a parameter or None, got Shard: Shard(dim=0); pass "
        "lambda param: Shard(1), say",
    ),
    "axis": (
        lambda: any_dims(shard=3),
        "shard to be the name of a mesh axis, a tuple of names or None, got int: 3",
    ),
    "axis of replicas": (
        lambda: any_dims("dp", replicate={"a": 1}),
        "replicate to be the name of a mesh axis, a tuple of names or None, got dict: {'a': 1}",
    ),
    "placement": (
        lambda: any_placement(Replicate()),
        "placement to be Shard(dim) or None, got Replicate: Replicate()",
    ),
    "mesh": (
        lambda: any_placement(None, mesh=3),
        "mesh to be a DeviceMesh or None, got int: 3",
    ),
    "modules": (
        lambda: sharded().set_modules_to_forward_prefetch(sharded()),
        "modules to be sharded modules, got FSDPLinear; pass a list, also of one",
    ),
    "modules for backward": (
        lambda: sharded().set_modules_to_backward_prefetch(None),
        "modules to be sharded modules, got NoneType: None; pass a list, also of one",
    ),
    "modules that share": (
        lambda: any_share(sharded()),
        "modules to be sharded modules, got FSDPLinear; pass a list, also of one",
    ),
    "modules in a tensor": (
        lambda: any_share(torch.tensor(1.0)),
        "modules to be sharded modules, got Tensor: tensor(1.); pass a list, also of one",
    ),
    "stream": (
        lambda: sharded().set_all_reduce_hook(print, stream="s"),
        "stream to be a torch.Stream or None, got str: 's'",
    ),
    "depth": (
        lambda: sharded().set_prefetch_depth(1.5),
        "depth to be an int, got float: 1.5",
    ),
    "module": (
        lambda: any_register([], "forward"),
        "module to be an nn.Module, got list: []; call it for each",
    ),
    "method": (
        lambda: any_register(sharded(), 3),
        "method_name to be the name of a method, got int: 3",
    ),
    "parameters": (
        lambda: any_clip(sharded(), 1.0),
        "parameters to be tensors, got FSDPLinear; pass its parameters()",
    ),
    "parameters with names": (
        lambda: any_clip([("weight", 3)], 1.0),
        "parameters to be tensors, got tuple: ('weight', 3); pass its parameters()",
    ),
    "max_norm": (
        lambda: with_gradients().clip_grad_norm_("x"),
        "max_norm to be a number, got str: 'x'",
    ),
    "max_norm without gradients": (
        lambda: sharded().clip_grad_norm_(None),
        "max_norm to be a number, got NoneType: None",
    ),
    "max_norm of several": (
        lambda: sharded().clip_grad_norm_(torch.ones(2)),
        "max_norm to be a number, got Tensor: tensor([1., 1.])",
    ),
    "norm_type": (
        lambda: any_clip(sharded().parameters(), 1.0, "two"),
        "norm_type to be a number, got str: 'two'",
    ),
    "model to weigh": (
        lambda: any_weigh("model", 3),
        "model to be an nn.Module, got str: 'model'",
    ),
    "weight": (lambda: any_weigh(sharded(), "x"), "weight to be a number, got str: 'x'"),
    "loss": (
        lambda: any_weigh(sharded(), 3, "loss"),
        "loss to be a number, got str: 'loss'",
    ),
    "model": (
        lambda: any_uneven(None, []),
        "model to be an nn.Module, got NoneType: None",
    ),
    "batches": (lambda: any_uneven(sharded(), 3), "batches to be iterable, got int: 3"),
    "init_scale": (
        lambda: any_scaler(init_scale="x"),
        "init_scale to be a number, got str: 'x'",
    ),
    "growth_factor": (
        lambda: any_scaler(growth_factor=None),
        "growth_factor to be a number, got NoneType: None",
    ),
    "backoff_factor": (
        lambda: any_scaler(backoff_factor=True),
        "backoff_factor to be a number, got bool: True",
    ),
    "growth_interval": (
        lambda: any_scaler(growth_interval=3.5),
        "growth_interval to be an int, got float: 3.5",
    ),
    "device": (
        lambda: any_scaler(device=3),
        "device to be the type of a device, such as 'cuda', or None, got int: 3",
    ),
    "process group": (
        lambda: any_sync(nn.Linear(4, 4), process_group="x"),
        "process_group to be a ProcessGroup that this rank is in, got str: 'x'",
    ),
    "process group that is empty": (
        lambda: any_sync(nn.Linear(4, 4), process_group=[]),
        "process_group to be a ProcessGroup that this rank is in, got list: []",
    ),
    "mesh for process group": (
        lambda: any_scaler(process_group=dist.init_device_mesh("cpu", (2,))),
        "process_group to be a ProcessGroup that this rank is in, got DeviceMesh: "
        "DeviceMesh((2,), 'cpu', stride=(1,)); pass its mesh.get_group()",
    ),
    "model to explain": (
        lambda: any_explain(3),
        "model to be an nn.Module, got int: 3",
    ),
    "optimizer to explain": (
        lambda: any_explain(sharded(), torch.optim.SGD),
        "optimizer to be a torch.optim.Optimizer or None, got type: <class 'torch.optim.sgd.SGD'>",
    ),
    "bucket_bytes": (
        lambda: any_explain(sharded(), bucket_bytes="x"),
        "bucket_bytes to be an int, got str: 'x'",
    ),
    "module to trace": (
        lambda: open_trace(module=3),
        "module to be an nn.Module, got int: 3",
    ),
    "folder": (lambda: open_trace(folder=3), "folder to be a path or None, got int: 3"),
    "skip": (lambda: open_trace(skip=None), "skip to be an int, got NoneType: None"),
    "steps": (lambda: open_trace(steps=2.0), "steps to be an int, got float: 2.0"),
    "module to record": (
        lambda: open_events([]),
        "module to be an nn.Module, got list: []; call it for each",
    ),
    "build_model": (
        lambda: told(build_model=3),
        "build_model to be a function that makes a module, got int: 3",
    ),
    "shard": (lambda: told(shard=3), "shard to be a function or None, got int: 3"),
    "loss to estimate": (
        lambda: told(loss=None),
        "loss to be a function of output and batch, got NoneType: None",
    ),
    "optimizer to estimate": (
        lambda: told(optimizer="adam"),
        "optimizer to be a function of parameters, a mapping or None, got str: 'adam'",
    ),
    "flops": (
        lambda: told(flops="many", bandwidth=1.0),
        "flops to be a number, got str: 'many'",
    ),
    "module to synchronize": (lambda: any_sync(3), "module to be an nn.Module, got int: 3"),
    "bytes to synchronize": (
        lambda: any_sync(nn.Linear(4, 4), bucket_nbytes=1.5),
        "bucket_nbytes to be an int, got float: 1.5",
    ),
    "dtype to iterate": (
        lambda: call(iter_full, sharded(), dtype="bf16"),
        "dtype to be a torch.dtype or None, got str: 'bf16'",
    ),
    "dtype to save": (
        lambda: call(save_full, sharded(), "weights", dtype="bf16"),
        "dtype to be a torch.dtype or None, got str: 'bf16'",
    ),
    "optimizer to move": (
        lambda: call(move, sharded(), 3, dist.init_device_mesh("cpu", (2,))),
        "optimizer to be a torch.optim.Optimizer or several, got int: 3",
    ),
    "bytes to move": (
        lambda: call(move, sharded(), (), dist.init_device_mesh("cpu", (2,)), bucket_nbytes="x"),
        "bucket_nbytes to be an int, got str: 'x'",
    ),
    "optimizers to park": (
        lambda: call(parked, sharded(), [3], folder="parked"),
        "optimizer to be a torch.optim.Optimizer or several, got int: 3",
    ),
    "folder to park in": (
        lambda: call(parked, sharded(), folder=3),
        "folder to be a path or None, got int: 3",
    ),
    "optimizer to make flat": (
        lambda: call(flat, 3),
        "optimizer to be a torch.optim.Optimizer, got int: 3",
    ),
    "model with layouts": (
        lambda: call(with_layout, 3, {}),
        "model to be an nn.Module, got int: 3",
    ),
    "layouts": (
        lambda: call(with_layout, sharded(), 3),
        "layouts to be a mapping from names to layouts, got int: 3",
    ),
}

VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "reshard_after_forward": (
        lambda: sharded().set_reshard_after_forward(None),
        "reshard_after_forward to be True, False or a number of ranks, got None",
    ),
    "max_norm": (
        lambda: sharded().clip_grad_norm_(-1.0),
        "max_norm of at least 0, got -1.0",
    ),
    "max_norm that is none": (
        lambda: sharded().clip_grad_norm_(float("nan")),
        "max_norm of at least 0, got nan",
    ),
    "foreach": (
        lambda: sharded().clip_grad_norm_(1.0, foreach=1),
        "foreach to be a bool, got int: 1",
    ),
    "enabled": (
        lambda: any_scaler(enabled="no"),
        "enabled to be a bool, got str: 'no'",
    ),
    "bucket_bytes": (
        lambda: any_explain(sharded(), bucket_bytes=-1),
        "bucket_bytes of at least 1, got -1",
    ),
    "bytes of layouts": (
        lambda: call(with_layout, sharded(), {}, bucket_nbytes=0),
        "bucket_nbytes of at least 1, got 0",
    ),
    "flops": (
        lambda: told(flops=float("nan"), bandwidth=1.0),
        "positive speeds and a latency of at least 0, got flops=nan, bandwidth=1.0, "
        "replica_bandwidth=1.0, latency=0.0",
    ),
    "bandwidth": (
        lambda: told(flops=1.0, bandwidth=float("nan")),
        "positive speeds and a latency of at least 0, got flops=1.0, bandwidth=nan, "
        "replica_bandwidth=nan, latency=0.0",
    ),
}


def error_of(call: Callable[[], object]) -> tuple[type[Exception], str]:
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("case", TYPES)
def test_wrong_types(case: str) -> None:
    call, text = TYPES[case]
    with fake_ranks(2):
        assert error_of(call) == (TypeError, f"Expected {text}")


@pytest.mark.parametrize("case", VALUES)
def test_wrong_values(case: str) -> None:
    call, text = VALUES[case]
    with fake_ranks(2):
        assert error_of(call) == (ValueError, f"Expected {text}")


# Every flag of every method ----------------------------------------------------------------------

FLAGS = [
    (method, flag.name)
    for method, function in vars(FSDPModule).items()
    if inspect.isfunction(function)
    and not method.startswith("_")
    and method not in ("zero_grad", "requires_grad_")  # as nn.Module's, which take what is true
    for flag in inspect.signature(function).parameters.values()
    if flag.annotation == "bool"
]
REST: dict[str, Any] = {
    "clip_grad_norm_": {"max_norm": 1.0},
    "set_prefetch_depth": {"depth": 1},
    "set_reduce_scatter_max_input_buffers": {"max_input_buffers": 1},
    "set_reshard_after_forward": {"reshard_after_forward": True},
}


@pytest.mark.parametrize(("method", "flag"), FLAGS)
def test_a_flag_that_is_no_bool(method: str, flag: str) -> None:
    """Such as "False", which is true."""
    with fake_ranks(2):
        module = sharded()
        given = REST.get(method, {})
        for parameter in inspect.signature(getattr(module, method)).parameters.values():
            if parameter.annotation == "bool" and parameter.default is parameter.empty:
                given = {parameter.name: True, **given}
        said = error_of(lambda: getattr(module, method)(**{**given, flag: "False"}))
    assert said == (ValueError, f"Expected {flag} to be a bool, got str: 'False'")


WITH_FLAGS: dict[Any, tuple[object, ...]] = {
    unsharded: (),
    iter_full: (),
    load_sharded: ("weights",),
    save_full: ("weights",),
    sync_module_states: (),
}


@pytest.mark.parametrize(
    ("function", "flag"),
    [
        (function, flag.name)
        for function in WITH_FLAGS
        for flag in inspect.signature(function).parameters.values()
        if flag.annotation == "bool"
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_flag_of_a_function_that_is_no_bool(function: Any, flag: str) -> None:
    with fake_ranks(2):
        given = {flag: "False"}
        said = error_of(lambda: call(function, sharded(), *WITH_FLAGS[function], **given))
    assert said == (ValueError, f"Expected {flag} to be a bool, got str: 'False'")


def test_a_flag_of_an_optimizer_that_is_no_bool() -> None:
    with fake_ranks(2):
        optimizer = torch.optim.SGD(sharded().parameters())
        said = error_of(lambda: call(flat, optimizer, elementwise="False"))
    assert said == (ValueError, "Expected elementwise to be a bool, got str: 'False'")


def test_there_are_flags() -> None:
    assert len(FLAGS) > 20
    assert ("set_requires_gradient_sync", "recurse") in FLAGS
    assert ("unshard", "async_op") in FLAGS


# What is right ----------------------------------------------------------------------------------


def test_what_torch_takes_is_taken() -> None:
    """Containers of modules, ``"inf"``, numbers as tensors, lists of names."""
    with fake_ranks(2):
        module = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2)))
        root: Any = fully_shard(module)
        root.set_modules_to_forward_prefetch(nn.ModuleList(root))
        root.set_modules_to_backward_prefetch(iter(root))
        share_comm_ctx(module for module in [sharded(), sharded()])  # type: ignore[arg-type]
        root(torch.ones(2, 4)).sum().backward()
        norm = root.clip_grad_norm_(torch.tensor(1e9), float("inf"))
        assert clip_grad_norm_(root.parameters(), float("inf"), "inf") == norm
        assert any_dims(shard=["a", "b"]).shard_names == ("a", "b")
        assert register_fsdp_forward_method(nn.Linear(2, 2), "missing") is None  # type: ignore[func-returns-value]
        assert not any_scaler(enabled=False, init_scale=None).is_enabled()
