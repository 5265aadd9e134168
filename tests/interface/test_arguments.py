"""What public functions say of arguments of wrong types: which, what was expected, what came."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import composable_shard
from composable_shard import (
    DataParallelMeshDims,
    FSDPModule,
    ShardedGradScaler,
    apply_fully_shard,
    changed_since,
    clip_grad_norm_,
    estimate,
    explain,
    fully_shard,
    iter_full,
    load_sharded,
    local_shards,
    move,
    parked,
    register_fsdp_forward_method,
    save_full,
    share_comm_ctx,
    sit_out,
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


def open_unsharded(**kwargs: Any) -> None:
    with unsharded(**{"module": sharded(), **kwargs}):
        raise AssertionError("must not get here")


def open_events(module: Any) -> None:
    with record_events(module):
        raise AssertionError("must not get here")


def open_parked(*args: Any, **kwargs: Any) -> None:
    with parked(*args, **kwargs):
        raise AssertionError("must not get here")


def stream(**kwargs: Any) -> None:
    next(iter_full(**{"model": nn.Linear(4, 4), **kwargs}))


def weighed(*args: Any) -> None:
    with weigh(sharded()) as weighing:
        weighing.add(*args)


def told(**kwargs: Any) -> None:
    estimate(**{"build_model": nn.Identity, "mesh_shape": 2, "batch": torch.ones(1), **kwargs})


any_of: Any = fully_shard  # to be called with what type checkers refuse
any_dims: Any = DataParallelMeshDims
any_apply: Any = apply_fully_shard
any_sit_out: Any = sit_out
any_scaler: Any = ShardedGradScaler
any_clip: Any = clip_grad_norm_
any_uneven: Any = uneven
any_weigh: Any = weigh
any_explain: Any = explain
any_share: Any = share_comm_ctx
any_register: Any = register_fsdp_forward_method
any_sync: Any = sync_module_states
any_flat: Any = flat
any_layouts: Any = with_layout
any_save: Any = save_full
any_load: Any = load_sharded
any_move: Any = move

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
        lambda: any_weigh("model").__enter__(),
        "model to be an nn.Module, got str: 'model'",
    ),
    "num_tokens": (
        lambda: weighed("x", torch.ones(())),
        "num_tokens to be a number, got str: 'x'",
    ),
    "loss": (lambda: weighed(3, 0.5), "loss to be a tensor, got float: 0.5"),
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
    "module to synchronize": (
        lambda: any_sync([]),
        "module to be an nn.Module, got list: []; call it for each",
    ),
    "src_rank": (
        lambda: any_sync(nn.Linear(4, 4), src_rank=0.0),
        "src_rank to be an int, got float: 0.0",
    ),
    "bytes of a bucket": (
        lambda: any_sync(nn.Linear(4, 4), bucket_nbytes="1MB"),
        "bucket_nbytes to be an int, got str: '1MB'",
    ),
    "model to stream": (
        lambda: stream(model={}),
        "model to be an nn.Module, got dict: {}",
    ),
    "bytes of a bucket to stream": (
        lambda: stream(bucket_bytes="64MB"),
        "bucket_bytes to be an int, got str: '64MB'",
    ),
    "dtype to stream": (
        lambda: stream(dtype="bfloat16"),
        "dtype to be a torch.dtype or None, got str: 'bfloat16'",
    ),
    "rename": (
        lambda: stream(rename={"a": "b"}),
        "rename to be a function or None, got dict: {'a': 'b'}",
    ),
    "device of weights": (
        lambda: stream(device=1.0),
        "device to be a device or its name, got float: 1.0",
    ),
    "target": (lambda: any_save(nn.Linear(4, 4), 3), "target to be a path, got int: 3"),
    "dtype to save": (
        lambda: any_save(nn.Linear(4, 4), "x", dtype=float),
        "dtype to be a torch.dtype or None, got type: <class 'float'>",
    ),
    "rename to save": (
        lambda: any_save(nn.Linear(4, 4), "x", rename="y"),
        "rename to be a function or None, got str: 'y'",
    ),
    "source": (
        lambda: any_load(nn.Linear(4, 4), None),
        "source to be a path, got NoneType: None",
    ),
    "rename to load": (
        lambda: any_load(nn.Linear(4, 4), "x", rename={}),
        "rename to be a function or None, got dict: {}",
    ),
    "module to unshard": (
        lambda: open_unsharded(module=3),
        "module to be an nn.Module, got int: 3",
    ),
    "model to park": (lambda: open_parked(3), "model to be an nn.Module, got int: 3"),
    "optimizer to park": (
        lambda: open_parked(sharded(), None),
        "optimizer to be a torch.optim.Optimizer or several, got NoneType: None",
    ),
    "optimizers to park": (
        lambda: open_parked(sharded(), [3]),
        "optimizer to be a torch.optim.Optimizer or several, got int: 3",
    ),
    "model to move": (
        lambda: any_move(3, (), dist.init_device_mesh("cpu", (2,))),
        "model to be an nn.Module, got int: 3",
    ),
    "mesh to move to": (
        lambda: any_move(sharded(), (), "cpu"),
        "mesh to be a DeviceMesh, got str: 'cpu'",
    ),
    "bytes to move": (
        lambda: any_move(sharded(), (), dist.init_device_mesh("cpu", (2,)), bucket_nbytes=True),
        "bucket_nbytes to be an int, got bool: True",
    ),
    "model with shards": (
        lambda: next(local_shards(3)),  # type: ignore[arg-type]
        "model to be an nn.Module, got int: 3",
    ),
    "model that may have changed": (
        lambda: changed_since([], {}),  # type: ignore[arg-type]
        "model to be an nn.Module, got list: []; call it for each",
    ),
    "versions": (
        lambda: changed_since(nn.Linear(4, 4), ["weight"]),  # type: ignore[arg-type]
        "versions to be a mapping from names to versions, got list: ['weight']",
    ),
    "module to shard by policy": (
        lambda: any_apply(None, nn.Linear),
        "module to be an nn.Module, got NoneType: None",
    ),
    "module to sit out": (
        lambda: any_sit_out("tower"),
        "module to be an nn.Module, got str: 'tower'",
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
    "device to estimate": (
        lambda: told(device=3),
        "device to be a device or its name, got int: 3",
    ),
    "flops": (
        lambda: told(flops="many", bandwidth=1.0),
        "flops to be a number, got str: 'many'",
    ),
    "optimizer to make flat": (
        lambda: any_flat(3),
        "optimizer to be a torch.optim.Optimizer, got int: 3",
    ),
    "model with layouts": (
        lambda: any_layouts(3, {}),
        "model to be an nn.Module, got int: 3",
    ),
    "layouts": (
        lambda: any_layouts(sharded(), 3),
        "layouts to be a mapping from names to layouts, got int: 3",
    ),
}

VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype to stream": (
        lambda: stream(dtype=torch.int8),
        "dtype to be a floating-point dtype, got torch.int8",
    ),
    "dtype to save": (
        lambda: any_save(nn.Linear(4, 4), "x", dtype=torch.int8),
        "dtype to be a floating-point dtype, got torch.int8",
    ),
    "bytes to move": (
        lambda: any_move(sharded(), (), dist.init_device_mesh("cpu", (2,)), bucket_nbytes=0),
        "bucket_nbytes of at least 1, got 0",
    ),
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
    "elementwise": (
        lambda: any_flat(torch.optim.SGD(sharded().parameters()), elementwise="False"),
        "elementwise to be a bool, got str: 'False'",
    ),
    "bytes of layouts": (
        lambda: any_layouts(sharded(), {}, bucket_nbytes=0),
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


def of_function(function: Any, **kwargs: Any) -> None:
    """Call a public function with as little as it needs."""
    given: dict[Any, tuple[Any, ...]] = {
        clip_grad_norm_: ([], 1.0),
        save_full: (nn.Linear(4, 4), "x"),
        load_sharded: (nn.Linear(4, 4), "x"),
    }
    args = given.get(function, () if isinstance(function, type) else (nn.Linear(4, 4),))
    result = function(*args, **kwargs)
    if isinstance(result, contextlib.AbstractContextManager):
        result.__enter__()
    elif isinstance(result, Iterator):
        next(result)


FUNCTION_FLAGS = [
    (name, flag.name)
    for name in composable_shard.__all__
    if inspect.isroutine(function := getattr(composable_shard, name))
    or function is ShardedGradScaler
    for flag in inspect.signature(function).parameters.values()
    if flag.annotation in ("bool", "bool | None")
]


@pytest.mark.parametrize(("name", "flag"), FUNCTION_FLAGS)
def test_a_flag_of_a_function_that_is_no_bool(name: str, flag: str) -> None:
    function = getattr(composable_shard, name)
    said = error_of(lambda: of_function(function, **{flag: "False"}))
    assert said == (ValueError, f"Expected {flag} to be a bool, got str: 'False'")


def test_there_are_flags() -> None:
    assert len(FLAGS) > 20
    assert len(FUNCTION_FLAGS) >= 15
    assert ("unsharded", "with_grads") in FUNCTION_FLAGS
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
