"""The text of every error: exact, and the same on all ranks where ranks could differ.

Those that need real ranks are in ``parameters/test_state.py``, ``faults`` and
``subclasses/test_errors.py``; those of what a training loop calls are in ``train``. The last test
finds every ``raise`` of the package in one of them.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transport.own_collectives import CopyingAllGather

import composable_shard
from composable_shard import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MaterializationError,
    MixedPrecisionPolicy,
    ShardError,
    ShardPlacementResult,
    StaleParameterError,
    fully_shard,
)
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


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or ("replicate", "shard"))


def on_mesh(mesh: DeviceMesh, placement: Any) -> nn.Linear:
    module = nn.Linear(4, 4, bias=False)
    weight = distribute_tensor(torch.zeros(4, 4), mesh, [placement, Replicate()])
    module.weight = nn.Parameter(weight)
    return module


def on_another_device() -> nn.Linear:
    module = nn.Linear(4, 4, bias=False, device="meta")
    mesh = DeviceMesh("meta", torch.arange(4), _init_backend=False)
    weight = DTensor.from_local(module.weight.data, mesh, [Replicate()], run_check=False)
    module.weight = nn.Parameter(weight)
    return module


def by_names(mesh: DeviceMesh, module: nn.Module) -> None:
    fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def custom_then_memory() -> None:
    module = sharded()
    module.set_custom_all_gather(CopyingAllGather())
    module.set_allocate_memory_from_process_group_for_comm(True)


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
        "to before; shard what was added to it, such as new adapters, alone",
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
]


# Of one of four ranks: meshes, placements, policies and settings.
CASES_OF_FOUR: list[tuple[Callable[[], object], type[Exception], str]] = [
    # Meshes
    (
        lambda: fully_shard(linear(), mesh=init_device_mesh("cpu", (2, 2))),
        ValueError,
        "Expected a 2-D mesh to name its axes (replicate, shard), got none: DeviceMesh((2, 2), "
        "'cpu', stride=(2, 1)); pass mesh_dim_names to init_device_mesh",
    ),
    *(
        (
            lambda names=names: fully_shard(linear(), mesh=square(*names)),
            ValueError,
            "Expected a mesh of the axes (replicate, shard), or of one that shards, got axes named "
            f"{names}; pass the axes in this order, or name what each is for by "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)",
        )
        for names in (("shard", "replicate"), ("dp_shard", "tp"), ("data", "dp_replicate"))
    ),
    (
        lambda: fully_shard(linear(), mesh=square()["replicate"]),
        ValueError,
        "Expected a mesh of the axes (replicate, shard), or of one that shards, got axes named "
        "('replicate',); pass the axes in this order, or name what each is for by "
        "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)",
    ),
    (
        lambda: fully_shard(nn.Sequential(nn.LazyLinear(4))),
        ValueError,
        "Expected parameter '0.weight' of LazyLinear to have a shape, got an uninitialized one; "
        "run a forward of the model before fully_shard",
    ),
    (
        lambda: fully_shard(linear(), mesh=square(), dp_mesh_dims="shard"),  # type: ignore[arg-type]
        TypeError,
        "Expected dp_mesh_dims to be a DataParallelMeshDims, got str: 'shard'",
    ),
    (
        lambda: by_names(square(), linear()),
        ValueError,
        "Expected dp_mesh_dims to name axes out of ('replicate', 'shard'), got 'dp'",
    ),
    (
        DataParallelMeshDims,
        ValueError,
        "Expected shard or replicate to name a mesh axis, got neither",
    ),
    (
        lambda: DataParallelMeshDims(shard=("dp", 1)),  # type: ignore[arg-type]
        TypeError,
        "Expected names of mesh axes, got int: 1",
    ),
    (
        lambda: DataParallelMeshDims(shard="dp", replicate="dp"),
        ValueError,
        "Expected each mesh axis to be named once, got ('dp', 'dp')",
    ),
    # Placements
    (
        lambda: fully_shard(on_another_device()),
        ValueError,
        "Expected the DTensor parameter 'weight' on a mesh of cpu devices, got "
        "DeviceMesh((4,), 'meta', stride=(1,))",
    ),
    (
        lambda: by_names(square("dp", "tp"), linear()),
        ValueError,
        "Expected parameter 'weight' to be a DTensor on the mesh that dp_mesh_dims describes, got "
        "a plain Parameter; distribute it first",
    ),
    (
        lambda: by_names(square("dp", "tp"), on_mesh(square("dp", "cp"), Replicate())),
        ValueError,
        "Expected parameter 'weight' on the mesh that was passed to fully_shard, "
        "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), got one on "
        "DeviceMesh((dp=2, cp=2), 'cpu', stride=(2, 1)); for a parameter on some of its axes pass "
        "the data-parallel ones alone, such as mesh['data'], without dp_mesh_dims",
    ),
    (
        lambda: by_names(square("dp", "tp"), on_mesh(square("dp", "tp"), Shard(0))),
        ValueError,
        "Expected parameter 'weight' to be replicated over the data-parallel axis 'dp', got S(0)",
    ),
    (
        lambda: fully_shard(
            linear(),
            shard_placement_fn=lambda _: ShardPlacementResult("rows"),  # type: ignore[arg-type]
        ),
        ValueError,
        "Expected shard_placement_fn to return Shard, a DeviceMesh, ShardPlacementResult or None "
        "for parameter 'weight', got ShardPlacementResult: ShardPlacementResult(placement='rows', "
        "mesh=None)",
    ),
    (
        lambda: fully_shard(
            linear(),
            shard_placement_fn=lambda _: ShardPlacementResult(mesh=init_device_mesh("cpu", (2, 2))),
        ),
        ValueError,
        "Expected a 2-D mesh to name its axes (replicate, shard), got none: DeviceMesh((2, 2), "
        "'cpu', stride=(2, 1)); pass mesh_dim_names to init_device_mesh, from shard_placement_fn "
        "for parameter 'weight'",
    ),
    (
        lambda: fully_shard(linear(), mesh=DeviceMesh("cpu", [1, 2])),
        ValueError,
        "Expected a mesh that rank 0 is in, got DeviceMesh((2,), 'cpu', stride=(1,)); ranks that "
        "are to have no part of a module leave it as it is",
    ),
    (
        lambda: fully_shard(
            linear(),
            shard_placement_fn=lambda _: ShardPlacementResult(mesh=DeviceMesh("cpu", [1, 2])),
        ),
        ValueError,
        "Expected a mesh that rank 0 is in, got DeviceMesh((2,), 'cpu', stride=(1,)); ranks that "
        "are to have no part of a module leave it as it is, from shard_placement_fn for parameter "
        "'weight'",
    ),
    # Resharding
    (
        lambda: fully_shard(linear(), reshard_after_forward=3),
        ValueError,
        "Expected reshard_after_forward to divide the number of shards, got 3 for 4 shards",
    ),
    (
        lambda: sharded().set_reshard_after_forward(None.__class__),
        ValueError,
        "Expected reshard_after_forward to be True, False, a number of ranks or None, got type: "
        "<class 'NoneType'>",
    ),
    # Offloading
    (
        lambda: CPUOffloadPolicy(pin_memory="yes"),  # type: ignore[arg-type]
        TypeError,
        "Expected pin_memory to be a bool, got str: 'yes'",
    ),
    (
        lambda: fully_shard(linear(), offload_policy={"weight": "cpu"}),  # type: ignore[dict-item]
        TypeError,
        "Expected offload_policy to be a composable_shard.OffloadPolicy for 'weight', got "
        "builtins.str",
    ),
    (
        lambda: fully_shard(linear(), offload_policy={"weigth": CPUOffloadPolicy()}),
        ValueError,
        "Expected offload_policy to name parameters of the module, got ['weigth']; there are "
        "['bias', 'weight']",
    ),
    # Reductions
    (
        lambda: sharded().set_gradient_divide_factor(0),
        ValueError,
        "Expected factor to be a positive number, got 0",
    ),
    (
        lambda: sharded().set_reduce_scatter_max_input_buffers(True),
        TypeError,
        "Expected max_input_buffers to be an int, got bool: True",
    ),
    (
        lambda: sharded().set_reduce_scatter_max_input_buffers(0),
        ValueError,
        "Expected max_input_buffers of at least 1, got 0",
    ),
    (
        lambda: sharded().set_all_reduce_hook("hook"),
        TypeError,
        "Expected hook to be callable, got str: 'hook'",
    ),
    (
        lambda: fully_shard(linear(), mesh=square()).set_all_reduce_hook(  # type: ignore[operator]
            print, stream=torch.Stream("cpu")
        ),
        ValueError,
        "Expected no stream for the root group, which has replicas: their all-reduce decides when "
        "the hook runs",
    ),
    (
        lambda: sharded().set_post_optim_event("event"),
        TypeError,
        "Expected event to have a method wait, as a torch.Event has, got str",
    ),
    # Communication
    (
        lambda: sharded().set_custom_all_gather(print),
        TypeError,
        "Expected a custom all-gather with allocate and __call__, got builtin_function_or_method",
    ),
    (
        lambda: sharded().set_custom_reduce_scatter(None),
        TypeError,
        "Expected a custom reduce-scatter with allocate and __call__, got NoneType",
    ),
    (
        lambda: sharded().set_allocate_memory_from_process_group_for_comm(True),
        ShardError,
        "Expected a backend that allocates memory for the root group, got fake, which does not",
    ),
    (
        lambda: sharded().set_symm_mem_for_comm(),
        ShardError,
        "Expected the root group on NCCL, whose symmetric memory collectives can use, got fake",
    ),
    (
        lambda: sharded().set_symm_mem_for_comm("NVSHMEM"),
        ValueError,
        "Expected the symmetric memory of 'NCCL', got 'NVSHMEM'",
    ),
    (
        custom_then_memory,
        ShardError,
        "Expected built-in collectives to choose the memory of, got custom ones, which allocate "
        "their own",
    ),
]


@pytest.mark.parametrize(
    ("ranks", "call", "error", "text"),
    [(2, *case) for case in CASES] + [(4, *case) for case in CASES_OF_FOUR],
    ids=[case[2][9:50] for case in CASES + CASES_OF_FOUR],
)
def test_message(ranks: int, call: Callable[[], object], error: type[Exception], text: str) -> None:
    with fake_ranks(ranks), pytest.raises(Exception) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == text


def test_message_of_a_mesh_of_three_axes() -> None:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        with pytest.raises(ValueError) as caught:
            fully_shard(linear(), mesh=mesh)
        assert str(caught.value) == (
            f"Expected mesh to have 1 axis, or 2 (replicate, shard), got 3: {mesh}; pass the "
            "data-parallel axes, such as mesh['shard'], or name them by dp_mesh_dims"
        )


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
        if "testing" in path.parts or "core_next" in path.parts:
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
    """Find each string that a test holds, and the innermost message that ends it.

    What is formatted into it stands as ``{}``.
    """
    texts = set()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                texts.add("".join(map(str, parts)))
    return texts | {text[text.rindex("Expected ") :] for text in texts if "Expected " in text}


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
