"""The text of every error: exact, and the same on all ranks where ranks could differ.

Those that need real ranks are in the files of ``tests/dist`` that are imported here. The last test
finds every ``raise`` of the package in one of them.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_extension_errors import TEXTS as EXTENSION_TEXTS
from dist.test_mismatches import TEXTS as MISMATCH_TEXTS
from dist.test_modules_double_backward import TEXTS as DOUBLE_BACKWARD_TEXTS
from dist.test_modules_pipelines import TEXTS as PIPELINE_TEXTS
from dist.test_state_errors import TEXTS as STATE_TEXTS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import composable_shard
from composable_shard import (
    FSDPModule,
    MaterializationError,
    MixedPrecisionPolicy,
    ShardError,
    StaleParameterError,
    fully_shard,
)
from composable_shard.core.layout import ParamLayout
from composable_shard.insight.trace import EVENTS, trace
from composable_shard.testing import fake_ranks


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def sharded() -> Any:
    return fully_shard(linear())


def with_scalar() -> nn.Module:
    module = linear()
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return nn.Sequential(module)


def with_dtensor() -> nn.Module:
    module = linear()
    weight = distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (2,)), [Replicate()])
    module.weight = nn.Parameter(weight)
    return module


def on_cuda() -> nn.Module:
    module, device = linear(), torch.device("cuda:0")
    weight = FakeTensor(FakeTensorMode(), torch.empty(4, 4, device="meta"), device)
    module.weight = nn.Parameter(weight)
    return module


def shard_tied() -> None:
    first, second = linear(), linear()
    second.weight = first.weight
    fully_shard(nn.Sequential(first))
    fully_shard(second)


def open_trace(module: nn.Module, *events: str) -> None:
    with trace(module, *events):
        raise AssertionError("must not get here")


CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    # What is sharded
    (
        lambda: fully_shard("layer"),  # type: ignore[type-var]
        TypeError,
        "Expected module to be an nn.Module or a list of them, got str",
    ),
    (lambda: fully_shard([]), ValueError, "Expected at least one module, got an empty list"),
    (
        lambda: fully_shard([linear(), None]),  # type: ignore[list-item]
        TypeError,
        "Expected a list of nn.Module, got NoneType at index 1",
    ),
    (
        lambda: fully_shard(nn.ModuleList([linear()])),
        ValueError,
        "Expected a module with a forward, got the container ModuleList; "
        "call fully_shard on its children, or on a list of them",
    ),
    (
        lambda: fully_shard(sharded()),
        ValueError,
        "Expected a module that is not sharded, got FSDPLinear, which fully_shard was applied "
        "to before",
    ),
    # How it is sharded
    (
        lambda: fully_shard(linear(), mesh=2),  # type: ignore[arg-type]
        TypeError,
        "Expected mesh to be a DeviceMesh, got int: 2",
    ),
    (
        lambda: fully_shard(linear(), reshard_after_forward="no"),  # type: ignore[arg-type]
        ValueError,
        "Expected reshard_after_forward to be True, False or None, got str: 'no'",
    ),
    (
        lambda: fully_shard(linear(), mp_policy=TorchPolicy()),  # type: ignore[arg-type]
        TypeError,
        "Expected mp_policy to be a composable_shard.MixedPrecisionPolicy, got "
        "torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    (
        lambda: fully_shard(linear(), offload_policy=True),  # type: ignore[arg-type]
        TypeError,
        "Expected offload_policy to be a composable_shard.OffloadPolicy, got builtins.bool",
    ),
    (
        lambda: fully_shard(linear(), ignored_params=[]),  # type: ignore[arg-type]
        TypeError,
        "Expected ignored_params to be a set, got list",
    ),
    (
        lambda: fully_shard(linear(), shard_placement_fn=lambda _: 1),  # type: ignore[arg-type]
        ValueError,
        "Expected shard_placement_fn to return Shard or None for parameter 'weight', got int: 1",
    ),
    (
        lambda: fully_shard(linear(), shard_placement_fn=lambda _: Shard(-3)),
        ValueError,
        "Expected shard_placement_fn to return a dim within the 2 dims of parameter 'weight', "
        "got S(-3)",
    ),
    # Which parameters are sharded
    (
        lambda: fully_shard(with_dtensor()),
        ValueError,
        "Expected parameter 'weight' to be a plain tensor, got a DTensor with placements "
        "(Replicate(),); a parameter is sharded by one fully_shard call only",
    ),
    (
        shard_tied,
        ValueError,
        "Expected parameter 'weight' to belong to one group, got one that is tied to a parameter "
        "of another ('0.weight' there); put the modules that share it into one group: "
        "fully_shard([module_a, module_b])",
    ),
    (
        lambda: fully_shard(with_scalar()),
        ValueError,
        "Expected parameter '0.scale' to have at least 1 dim, got a scalar; "
        "make it a tensor of shape [1], or pass it in ignored_params",
    ),
    (
        lambda: fully_shard(on_cuda()),
        ValueError,
        "Expected parameter 'weight' on cpu, on the CPU or on the meta device, got cuda:0",
    ),
    # Policies
    (
        lambda: MixedPrecisionPolicy(param_dtype="bf16"),  # type: ignore[arg-type]
        TypeError,
        "Expected param_dtype to be a torch.dtype or None, got str: 'bf16'",
    ),
    (
        lambda: MixedPrecisionPolicy(buffer_dtype=torch.int64),
        ValueError,
        "Expected buffer_dtype to be a floating-point dtype, got torch.int64",
    ),
    (
        lambda: MixedPrecisionPolicy(cast_forward_inputs=1),  # type: ignore[arg-type]
        TypeError,
        "Expected cast_forward_inputs to be a bool, got int: 1",
    ),
    # Methods
    (
        lambda: sharded().set_requires_gradient_sync(1),
        ValueError,
        "Expected requires_gradient_sync to be a bool, got int: 1",
    ),
    (
        lambda: sharded().set_is_last_backward(None),
        ValueError,
        "Expected is_last_backward to be a bool, got NoneType: None",
    ),
    (
        lambda: sharded().set_reshard_after_forward(2),
        ValueError,
        "Expected reshard_after_forward to be a bool, got int: 2",
    ),
    (
        lambda: sharded().set_reshard_after_backward("yes"),
        ValueError,
        "Expected reshard_after_backward to be a bool, got str: 'yes'",
    ),
    (
        lambda: sharded().set_modules_to_forward_prefetch([linear()]),
        ValueError,
        "Expected sharded modules, got Linear; apply fully_shard to it",
    ),
    (
        lambda: sharded().set_modules_to_backward_prefetch(["layer"]),
        ValueError,
        "Expected sharded modules, got str; apply fully_shard to it",
    ),
    (
        lambda: copy.deepcopy(nn.Sequential(sharded())),
        ShardError,
        "Expected to deepcopy a module that is not sharded, got FSDPLinear; "
        "copy its state_dict(), or deepcopy before fully_shard",
    ),
    (
        lambda: sharded().set_requires_all_reduce(False),
        ShardError,
        "Expected a method that composable_shard offers, got one of torch's FSDPModule on "
        "FSDPLinear; see composable_shard.FSDPModule for those there are",
    ),
    # Tracing
    (
        lambda: open_trace(linear()),
        ValueError,
        "Expected a sharded module, got Linear; apply fully_shard to it",
    ),
    (
        lambda: open_trace(sharded(), "reshard", "resharded"),
        ValueError,
        f"Expected events out of {EVENTS}, got ['resharded']",
    ),
    # Layouts
    (
        lambda: ParamLayout((4, 4), 2, 1),
        ValueError,
        "Expected a dim within 2 dims, got 2",
    ),
    (lambda: ParamLayout((4, 4), 0, 0), ValueError, "Expected at least 1 shard, got 0"),
]


@pytest.mark.parametrize(("call", "error", "text"), CASES, ids=[case[2][9:50] for case in CASES])
def test_message(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with fake_ranks(2), pytest.raises(Exception) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == text


TWO_AXES = (
    "Expected mesh to have 1 dim, got 2: {}; pass the axis to shard over, such as mesh['shard']"
)


def test_message_of_a_mesh_of_two_axes() -> None:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ValueError) as caught:
            fully_shard(linear(), mesh=mesh)
        assert str(caught.value) == TWO_AXES.format(mesh)
        assert fully_shard(linear(), mesh=mesh["shard"]).weight.to_local().shape == (2, 4)


def test_every_field_names_its_field() -> None:
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype"):
        with pytest.raises(TypeError) as caught:
            MixedPrecisionPolicy(**{field: 16})
        assert str(caught.value) == f"Expected {field} to be a torch.dtype or None, got int: 16"


# Completeness ------------------------------------------------------------------------------------

ROOT = Path(composable_shard.__file__).parent


def raised_templates() -> dict[str, re.Pattern[str]]:
    """Find each ``raise Error("...")`` outside of ``testing``, as a pattern of its text."""
    templates = {}
    for path in sorted(ROOT.rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                templates[place] = re.compile(_pattern(node.exc.args[0]) + r"\Z", re.DOTALL)
    return templates


def _pattern(text: ast.expr) -> str:
    if isinstance(text, ast.Constant):
        return re.escape(str(text.value))
    if isinstance(text, ast.JoinedStr):
        return "".join(map(_pattern, text.values))
    if isinstance(text, ast.BinOp):
        return _pattern(text.left) + _pattern(text.right)
    return ".*"


def test_every_raise_has_a_test_of_its_text() -> None:
    texts = [text for *_, text in CASES]
    texts += [TWO_AXES, *STATE_TEXTS.values(), *MISMATCH_TEXTS, *EXTENSION_TEXTS]
    texts += [*DOUBLE_BACKWARD_TEXTS.values(), *PIPELINE_TEXTS.values()]
    templates = raised_templates()
    assert len(templates) > 30
    untested = [place for place, pattern in templates.items() if not any(map(pattern.match, texts))]
    assert untested == []


def test_errors_of_states_are_runtime_errors() -> None:
    for error in (MaterializationError, StaleParameterError, composable_shard.ExtensionError):
        assert issubclass(error, ShardError) and issubclass(error, RuntimeError)
    assert issubclass(FSDPModule, torch.distributed.fsdp.FSDPModule)
