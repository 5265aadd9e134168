"""Flags of public functions take bools alone, and what torch takes is taken.

What is said of other arguments is in ``tests/test_messages.py``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import composable_shard
from composable_shard import (
    FSDPModule,
    ShardedGradScaler,
    clip_grad_norm_,
    fully_shard,
    load_sharded,
    register_fsdp_forward_method,
    save_full,
    share_comm_ctx,
)
from composable_shard.testing import fake_ranks


def sharded() -> Any:
    return fully_shard(nn.Linear(4, 4))


def error_of(call: Callable[[], object]) -> tuple[type[Exception], str]:
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value)


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
    assert len(FLAGS) > 20 and len(FUNCTION_FLAGS) >= 15
    assert ("unsharded", "with_grads") in FUNCTION_FLAGS
    assert {("set_requires_gradient_sync", "recurse"), ("unshard", "async_op")} <= {*FLAGS}


def test_what_torch_takes_is_taken() -> None:
    """Containers of modules, ``"inf"``, numbers as tensors, lists of names."""
    with fake_ranks(2):
        module = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2)))
        root: Any = fully_shard(module)
        root.set_modules_to_forward_prefetch(nn.ModuleList(root))
        root.set_modules_to_backward_prefetch(iter(root))
        share_comm_ctx(module for module in [sharded(), sharded()])  # type: ignore[arg-type]
        for param in root.parameters():
            param.grad = torch.ones_like(param)
        norm = root.clip_grad_norm_(torch.tensor(1e9), float("inf"))
        assert clip_grad_norm_(root.parameters(), float("inf"), "inf") == norm
        assert composable_shard.DataParallelMeshDims(shard=["a", "b"]).shard_names == ("a", "b")
        assert register_fsdp_forward_method(nn.Linear(2, 2), "missing") is None  # type: ignore[func-returns-value]
        assert not ShardedGradScaler(enabled=False, init_scale=None).is_enabled()
