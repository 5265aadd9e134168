"""Parameters that are tensor-parallel already are sharded once more, within their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nets import Block, Net
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from composable_shard import fully_shard
from composable_shard.testing import run_ranks
from meshes.compare import Oracle, gradient_differences, step_differences

WIDTH = 8


def plain_plan() -> dict[str, ParallelStyle]:
    return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def sequence_plan() -> dict[str, ParallelStyle]:
    return {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }


Mesh = tuple[tuple[int, ...], tuple[str, ...]]
MESHES: list[Mesh] = [
    ((2, 2), ("shard", "tp")),
    ((1, 2), ("shard", "tp")),
    ((2, 1), ("shard", "tp")),
    ((2, 1, 2), ("replicate", "shard", "tp")),
    ((1, 2, 2), ("replicate", "shard", "tp")),
]


def parallel_model(
    mesh: DeviceMesh, hidden: int, plan: Callable[[], dict[str, ParallelStyle]]
) -> tuple[nn.Module, Oracle]:
    torch.manual_seed(0)
    model = Net(2, WIDTH, hidden)
    oracle = Oracle(model)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan())
    return model, oracle


def shard_all(model: nn.Module, mesh: DeviceMesh, **options: object) -> None:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    data = mesh[names if len(names) > 1 else names[0]]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=data, **options)
    fully_shard(model, mesh=data, **options)


def batch(step: int, mesh: DeviceMesh, width: int = 4) -> torch.Tensor:
    """Ranks that differ by their tensor-parallel coordinate alone get the same batch."""
    data_rank = dist.get_rank() // mesh["tp"].size()
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + data_rank))


def train(shape: Mesh, hidden: int, reshard: bool | int) -> list[str]:
    mesh = init_device_mesh("cpu", shape[0], mesh_dim_names=shape[1])
    model, oracle = parallel_model(mesh, hidden, plain_plan)
    shard_all(model, mesh, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    found: list[str] = []
    for step in range(3):
        x = batch(step, mesh)
        model(x).square().sum().backward()
        oracle.model(x).square().sum().backward()
        oracle.take()
        oracle.reduce()
        found += step_differences(model, oracle, optimizers)
    return found


@pytest.mark.brief(2)
@pytest.mark.parametrize("hidden", [12, 10, 9])
@pytest.mark.parametrize("shape", MESHES, ids=lambda mesh: "x".join(map(str, mesh[0])))
def test_training_equals_that_of_the_oracle(shape: Mesh, hidden: int) -> None:
    ranks = torch.Size(shape[0]).numel()
    assert run_ranks(train, ranks, shape, hidden, True, timeout=60) == [[]] * ranks


def test_training_with_fewer_ranks_to_gather_from() -> None:
    assert run_ranks(train, 4, MESHES[0], 12, 2, timeout=60) == [[]] * 4
    assert run_ranks(train, 4, MESHES[0], 12, False, timeout=60) == [[]] * 4


@on_ranks(4)
def test_partial_gradients_of_sequence_parallelism_are_summed() -> None:
    """Each tensor-parallel rank has some rows; a norm's gradient is a sum over these ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(0)
    model = Block(WIDTH, 12)
    oracle = Oracle(model)
    parallelize_module(model, mesh["tp"], sequence_plan())
    fully_shard(model, mesh=mesh["shard"])
    x = batch(0, mesh, WIDTH)
    rows = x.chunk(2)[mesh["tp"].get_local_rank()]
    found: list[str] = []
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(rows).square().sum().backward()
        oracle.model(x).square().sum().backward()
        oracle.take()
    oracle.reduce()
    assert found + gradient_differences(dict(model.named_parameters()), oracle) == []


@on_ranks(4)
def test_placements_span_the_data_parallel_and_the_tensor_parallel_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model, _ = parallel_model(mesh, 12, plain_plan)
    shard_all(model, mesh)
    block = model.blocks[0]  # type: ignore[union-attr,index]
    seen: list[object] = [str(param.placements) for param in block.parameters()]
    seen.append(tuple(block.up.weight.to_local().shape))
    inside: list[object] = []
    block.up.register_forward_hook(lambda m, *_: inside.append(m.weight.placements))
    with model.no_sync():  # type: ignore[operator]
        model(batch(0, mesh)).sum().backward()
    seen += [*inside, block.up.weight.grad.placements, tuple(block.up.weight.grad.to_local().shape)]
    assert seen == [
        "(Shard(dim=0),)",
        "(Shard(dim=0),)",
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(Shard(dim=0), Shard(dim=1))",
        "(Shard(dim=0), Replicate())",
        (3, 8),
        (Shard(0),),
        (Partial("avg"), Shard(0)),
        (6, 8),
    ]
