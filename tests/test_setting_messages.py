"""The exact text of errors about meshes, placements, policies and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes.test_custom_communication import CopyingAllGather
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composable_shard import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    ShardError,
    ShardPlacementResult,
    fully_shard,
)
from composable_shard.testing import fake_ranks


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def sharded() -> Any:
    return fully_shard(linear())


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


CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    # Meshes
    (
        lambda: fully_shard(linear(), mesh=init_device_mesh("cpu", (2, 2))),
        ValueError,
        "Expected a 2-D mesh to name its axes (replicate, shard), got none: DeviceMesh((2, 2), "
        "'cpu', stride=(2, 1)); pass mesh_dim_names to init_device_mesh",
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
        "Expected max_input_buffers to be an int, got bool",
    ),
    (
        lambda: sharded().set_reduce_scatter_max_input_buffers(0),
        ValueError,
        "Expected max_input_buffers of at least 1, got 0",
    ),
    (
        lambda: sharded().set_all_reduce_hook("hook"),
        TypeError,
        "Expected hook to be callable, got str",
    ),
    (
        lambda: fully_shard(linear(), mesh=square()).set_all_reduce_hook(  # type: ignore[operator]
            print, stream=object()
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


@pytest.mark.parametrize(("call", "error", "text"), CASES, ids=[case[2][9:50] for case in CASES])
def test_message(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with fake_ranks(4), pytest.raises(Exception) as caught:
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
