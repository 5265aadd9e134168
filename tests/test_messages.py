"""The text of every error: exact, and the same on all ranks where ranks could differ.

Those that need real ranks are in ``tests/dist``: in ``test_state_errors.py``,
``test_mismatches.py`` and ``test_extension_errors.py``; those of what a training loop calls are in
``tests/train``. The last test finds every ``raise`` of the package in one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
from composable_shard.errors import TorchStateError
from composable_shard.insight.events import EVENTS, record_events
from composable_shard.testing import fake_ranks


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def sharded() -> Any:
    return fully_shard(linear())


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


def open_trace(module: nn.Module, *events: str) -> None:
    with record_events(module, *events):
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
        lambda: fully_shard(linear(), mesh=init_device_mesh("xpu", (2,))),
        ValueError,
        "Expected a mesh of devices that this process can use, got one of xpu devices, of which "
        "none is available; make the mesh for the device type of the machine, such as "
        "init_device_mesh('cpu', ...)",
    ),
    (
        lambda: fully_shard(linear(), reshard_after_forward="no"),  # type: ignore[arg-type]
        ValueError,
        "Expected reshard_after_forward to be True, False, a number of ranks or None, "
        "got str: 'no'",
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
        lambda: fully_shard(linear(), ignored_params={"weight"}),  # type: ignore[arg-type]
        TypeError,
        "Expected ignored_params to hold parameters, got str; pass the parameters themselves, "
        "such as {module.weight}",
    ),
    (
        lambda: fully_shard(linear(), ignored_params={torch.ones(2)}),  # type: ignore[arg-type]
        TypeError,
        "Expected ignored_params to hold parameters, got Tensor; pass the parameters themselves, "
        "such as {module.weight}",
    ),
    (
        lambda: fully_shard(linear(), ignored_params=nn.Linear(2, 2).parameters()),  # type: ignore[arg-type]
        TypeError,
        "Expected ignored_params to be a set, got generator",
    ),
    (
        lambda: fully_shard(linear(), shard_placement_fn=lambda _: 1),  # type: ignore[arg-type]
        ValueError,
        "Expected shard_placement_fn to return Shard, a DeviceMesh, ShardPlacementResult or None "
        "for parameter 'weight', got int: 1",
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
        "Expected the mesh of the DTensor parameter 'weight' and the data-parallel mesh to be "
        "parts of one mesh with named axes, got DeviceMesh((2,), 'cpu', stride=(1,)) and "
        "DeviceMesh((2,), 'cpu', stride=(1,)); pass the axes of that mesh over which data is "
        "parallel, such as mesh['data']",
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
        lambda: sharded().set_reshard_after_forward(3),
        ValueError,
        "Expected reshard_after_forward to divide the number of shards, got 3 for 2 shards",
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
        lambda: sharded()._set_unshard_async_op(True),
        TorchStateError,
        "Expected to read _training_state, _reshard_after_forward, is_unsharded alone of torch's "
        "private state of the root group, got unshard_async_op; use the methods of "
        "composable_shard.FSDPModule",
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


def texts_in_tests() -> set[str]:
    """Find each string that a test holds; what is formatted into it stands as ``{}``."""
    texts = set()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                texts.add("".join(map(str, parts)))
    return texts


def test_every_raise_has_a_test_of_its_text() -> None:
    texts = texts_in_tests()
    templates = raised_templates()
    assert len(templates) > 30
    untested = [place for place, pattern in templates.items() if not any(map(pattern.match, texts))]
    assert untested == []


def test_errors_of_states_are_runtime_errors() -> None:
    for error in (MaterializationError, StaleParameterError, composable_shard.ExtensionError):
        assert issubclass(error, ShardError) and issubclass(error, RuntimeError)
    assert issubclass(FSDPModule, torch.distributed.fsdp.FSDPModule)
