"""Experts move as a checkpoint has them; memory of a move, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import (
    DataParallelMeshDims,
    ShardError,
    ShardPlacementResult,
    clip_grad_norm_,
    fully_shard,
    move,
)
from composable_shard._torch import poisoned_memory, set_local_tensor
from composable_shard.testing import RankError, run_ranks, stop_ranks
from train.moved import MiB, follow_a_route, memory, on_mesh, return_unused


def fill(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if not param.is_meta:
                param.normal_(std=0.3)


# Tensor parallelism -------------------------------------------------------------------------------


def split_to(where: DeviceMesh) -> None:
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("shard", "tensor"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], PLAN)
    move(fully_shard(model, mesh=mesh["shard"]), (), where)


PLAN = {"0": ColwiseParallel()}


# Experts ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 4))
        self.down = nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.up) @ self.down).mean(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.mix(x))


def with_experts(where: dict[str, DeviceMesh], device: str) -> nn.Module:
    """Shard experts, which differ between even and odd ranks, on a mesh of their own."""
    theirs, all_ = where["*experts*"], where["*"]
    with torch.device(device):
        model = nn.Sequential(Layer(), Layer())
    fill(model, 5)
    if device == "cpu":
        fill(model[0].experts, 6 + column(dist.get_rank()))
        fill(model[1].experts, 16 + column(dist.get_rank()))
    fully_shard(model[0].experts, mesh=theirs)
    apart = {*model[1].experts.parameters()}
    fully_shard(model[0], mesh=all_)
    fully_shard(
        model[1],
        mesh=all_,
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(1), theirs) if p in apart else None,
    )
    return fully_shard(model, mesh=all_)


def column(rank: int) -> int:
    return rank % 2


def columns(*rows: tuple[int, int]) -> dict[str, DeviceMesh]:
    mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("data", "expert"))
    everywhere = DeviceMesh("cpu", sorted(rank for row in rows for rank in row))
    # torch does not slice a mesh on a rank that is not in it
    experts = mesh if mesh.get_coordinate() is None else mesh["data"]
    return {"*experts*": experts, "*": everywhere}


def is_in(where: dict[str, DeviceMesh]) -> bool:
    return where["*"].get_coordinate() is not None


ALL_FOUR = ((0, 1), (2, 3))
ROUTES: dict[str, list[tuple[tuple[int, int], ...]]] = {
    "experts-fewer": [ALL_FOUR, ((2, 1),), ALL_FOUR],
    "experts-more": [((0, 1),), ALL_FOUR],
}


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.brief(1)
@pytest.mark.parametrize("name", ROUTES)
@on_ranks(4)
def test_every_mesh_moves_as_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    places = [columns(*rows) for rows in ROUTES[name]]
    model = with_experts(next(filter(is_in, places)), "cpu" if is_in(places[0]) else "meta")
    optimizer = stock(model)
    if is_in(places[0]):
        train(model, optimizer, 0, 1)

    def build(where: dict[str, DeviceMesh]) -> tuple[nn.Module, torch.optim.Optimizer]:
        loaded = with_experts(where, "cpu")
        optim = stock(loaded)
        train(loaded, optim, 99)
        return loaded, optim

    suffix = f" {column(dist.get_rank())}"
    follow_a_route(model, optimizer, places, is_in, build, train, tmp_path, suffix)


def plain(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


# Memory -------------------------------------------------------------------------------------------


def test_memory_of_both_layouts_and_a_bucket() -> None:
    stop_ranks()  # what earlier tests have left in memory is none of this
    run_ranks(memory_of_a_move, 2)


def memory_of_a_move() -> None:
    """Move a model of 32 MiB, half of it on each of two ranks, to one of them."""
    whole, bucket, last = 32 * MiB, 2 * MiB, on_mesh(1)
    with poisoned_memory(False):
        ctypes.CDLL(None).mallopt(-3, MiB // 4)  # what is bigger goes back when it is freed
        model = fully_shard(nn.Linear(2048, 4096, bias=False), mesh=on_mesh(0, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
        small = plain(on_mesh(0, 1))
        move(small, (), on_mesh(1))  # what is loaded at the first time is none of this
        return_unused()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        move(model, optimizer, last, bucket_nbytes=bucket)
        peak = memory("VmHWM") - before
        return_unused()
        after = memory("VmRSS") - before
    new = 2 * whole if dist.get_rank() == 1 else 0
    assert peak <= new + bucket + MiB, (peak / MiB, new / MiB, after / MiB)
    assert peak >= new
    assert after == pytest.approx(new - whole, abs=2 * MiB)


# What is refused ----------------------------------------------------------------------------------


def of_class(kind: type) -> None:
    layer, local = nn.Linear(3, 4, bias=False), torch.ones(2, 3)
    fully_shard(layer, mesh=on_mesh(0, 1))
    set_local_tensor(layer.weight, kind(local, local))
    with contextlib.suppress(AttributeError, ShardError):
        layer.unshard()  # takes over what it finds, whether or not it can gather it
    layer.reshard()
    move(layer, (), on_mesh((0,), (1,)))


def flattened_axes() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("a", "b"))
    dims = DataParallelMeshDims(shard=("a", "b"))
    move(fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims), (), mesh)


def shorter_state() -> None:
    model = plain(on_mesh(0, 1))
    optimizer = stock(model)
    train(model, optimizer, 0)
    weight = model[0].weight
    short = DTensor.from_local(
        torch.ones(2, 6),
        weight.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    optimizer.state[weight]["exp_avg"] = short
    move(model, optimizer, on_mesh((0,), (1,)))


def joins_a_plain_dtensor() -> None:
    mesh = [on_mesh(0), on_mesh(1)][dist.get_rank()]
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = plain(mesh)
    spread = distribute_tensor(torch.ones(2), mesh, [Replicate()], src_data_rank=None)
    model.register_parameter("apart", nn.Parameter(spread))
    move(model, (), on_mesh(0, 1))


def name_other_meshes() -> None:
    move(plain(on_mesh(0, 1)), (), [on_mesh(0, 1), on_mesh((0,), (1,))][dist.get_rank()])


BEGIN = "Expected no failure while moving a model, got on rank "
ALONE = "to be cut by fully_shard alone, into plain tensors along one axis of a mesh, got "
INSTEAD = "; save a checkpoint instead"
REFUSED: dict[str, Callable[[], None]] = {
    f"{BEGIN}0: ShardError: Expected parameter 'weight' {ALONE}a subclass or all-gather hooks: "
    f"TwoTensor{INSTEAD}": partial(of_class, TwoTensor),
    "Expected 'up' of ranks [0, 1] to come from one mesh, got meshes of ranks [[0], [1]]": (
        lambda: move(with_experts(columns((0, 1)), "cpu"), (), on_mesh(0, 1))
    ),
    f"{BEGIN}0: ValueError: Expected a mesh for '2.weight', got none; add one for '*'": (
        lambda: move(plain(on_mesh(0, 1)), (), {"0.*": on_mesh((0,), (1,))})
    ),
    f"{BEGIN}1: ShardError: Expected all meshes to include this rank, got some without it": (
        lambda: move(plain(on_mesh(0, 1)), (), {"0.*": on_mesh(0), "*": on_mesh(0, 1)})
    ),
    f"{BEGIN}0: ShardError: Expected parameter '0.weight' {ALONE}tensor parallelism: "
    f"(_StridedShard(dim=0, sf=2), Shard(dim=0)){INSTEAD}": lambda: split_to(on_mesh(0, 1)),
    f"{BEGIN}0: ShardError: Expected parameter 'weight' {ALONE}DataParallelMeshDims(shard=('a', "
    f"'b'), replicate=None){INSTEAD}": flattened_axes,
    f"{BEGIN}0: ShardError: Expected a mesh of ascending ranks, got [1, 0]; save a "
    "checkpoint": lambda: move(plain(on_mesh(0, 1)), (), on_mesh(1, 0)),
    f"{BEGIN}0: ShardError: Expected state 'exp_avg' of 'weight' {ALONE}[2, 6] of [4, 6], "
    f"(Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)){INSTEAD}": shorter_state,
    f"{BEGIN}0: ShardError: Expected 'apart' {ALONE}a DTensor of (Replicate(),){INSTEAD}": (
        joins_a_plain_dtensor
    ),
    "Expected parameter '2.weight' on the same mesh on all of its ranks, got "
    "Ground(ranks=(0, 1), extents=(2,), roles=('shard',)) and "
    "Ground(ranks=(0, 1), extents=(2, 1), roles=('replicate', 'shard'))": name_other_meshes,
}


def refused(message: str) -> None:
    REFUSED[message]()


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(refused, 2, message)
    failure = caught.value.agreed()
    assert (failure.type_name, failure.message) == ("ShardError", message)


# States in the order of the ranks that had them ---------------------------------------------------


@on_ranks(2)
def test_a_full_checkpoint_after_a_join_has_the_moments_of_each_parameter() -> None:
    """The first layer is trained from the second step on: it comes last among the states."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model: Any = copy.deepcopy(whole).to("meta" if rank else "cpu")
    for layer in (*model, model):
        fully_shard(layer, mesh=on_mesh(rank))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, whole)]
    for one, optimizer in zip((model, whole), optimizers, strict=True):
        for is_trained in (False, True) if one is whole or rank == 0 else ():
            one[0].weight.requires_grad_(is_trained)
            one(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    move(model, optimizers[0], on_mesh(0, 1))
    orders = [list(optimizer.state_dict()["state"]) for optimizer in optimizers]
    assert orders[0] == orders[1] == [1, 2, 0]
    full: Any = get_optimizer_state_dict(
        model, optimizers[0], options=StateDictOptions(full_state_dict=True)
    )
    for name, param in whole.named_parameters():
        expected = optimizers[1].state[param]
        assert list(full["state"][name]) == list(expected)
        for kind, value in expected.items():
            torch.testing.assert_close(full["state"][name][kind], value, msg=f"{name} {kind}")
