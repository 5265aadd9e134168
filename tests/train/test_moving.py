"""Moving a model to other ranks: what a checkpoint on disk gives, bit by bit, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from training.cases import reproducible
from two_tensors import two_tensor_hooks, two_tensor_mlp

from composable_shard import CPUOffloadPolicy, ShardError, fully_shard, move, parked, unsharded
from composable_shard.optim import exchange
from composable_shard.optim.blocks import Box
from composable_shard.optim.flat import flat
from composable_shard.optim.layouts import Owned, Sharded, with_layout
from composable_shard.testing import RankError, run_ranks
from composable_shard.train.cargo import Ground
from composable_shard.train.move_plan import COPIES_SENT, Piece, cut_box, pieces_of, rounds_of

# PURE ---------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def grounds(draw: st.DrawFn) -> Ground:
    """Some of six ranks, in any order, as a mesh of one axis or of two."""
    extents = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 1), (1, 3), (2, 2), (3, 2)]))
    count = extents[0] * (extents[1] if len(extents) == 2 else 1)
    ranks = draw(st.permutations(range(6)))[:count]
    return Ground(tuple(ranks), extents)


def elements(box: Box) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for start, size in zip(box.starts, box.sizes, strict=True):
        found = {(*one, index) for one in found for index in range(start, start + size)}
    return found


@reproducible(300)
@given(shapes, st.data(), grounds(), grounds())
def test_every_rank_gets_each_of_its_elements_once(
    shape: tuple[int, ...], data: st.DataObject, before: Ground, after: Ground
) -> None:
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    have, want = before.holding(shape, dim), after.holding(shape, dim)
    pieces = pieces_of(5, have, want)
    assert all(piece.tensor == 5 for piece in pieces)
    for rank in range(6):
        got = [one for piece in pieces if piece.target == rank for one in elements(piece.box)]
        box = want.box(rank)
        assert len(got) == len(set(got))
        assert set(got) == (set() if box is None else elements(box))
    for piece in pieces:
        source = have.box(piece.source)
        assert source is not None and elements(piece.box) <= elements(source)
    for rank in set(before.ranks) & set(after.ranks):  # what a rank has is not sent to it
        own, wanted = have.box(rank), want.box(rank)
        assert own is not None and wanted is not None
        sent = {e for p in pieces if p.target == rank != p.source for e in elements(p.box)}
        assert not sent & elements(own)


@reproducible(200)
@given(shapes, st.integers(1, 40))
def test_boxes_are_cut(shape: tuple[int, ...], most: int) -> None:
    box = Box(tuple(range(1, len(shape) + 1)), shape)
    parts = list(cut_box(box, most))
    assert all(part.numel <= most for part in parts)
    found = [one for part in parts for one in elements(part)]
    assert len(found) == len(set(found)) and set(found) == elements(box)


@reproducible(200)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 30)), max_size=12),
    st.integers(8, 200),
)
def test_no_rank_has_more_than_a_bucket(sent: list[tuple[int, int, int]], nbytes: int) -> None:
    pieces = [
        Piece(index, source, target, Box((0,), (size,)))
        for index, (source, target, size) in enumerate(sent)
        if source != target
    ]
    rounds = rounds_of(pieces, [4] * len(sent), nbytes)
    for some in rounds:
        for rank in range(4):
            out = sum(4 * piece.box.numel for piece in some if piece.source == rank)
            into = sum(4 * piece.box.numel for piece in some if piece.target == rank)
            assert COPIES_SENT * out + into <= nbytes
    for piece in pieces:
        parts = [p.box for some in rounds for p in some if p.tensor == piece.tensor]
        assert [e for box in parts for e in sorted(elements(box))] == sorted(elements(piece.box))


# On ranks -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters that no number of ranks divides, on inner dims, transposed, tied, frozen, scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.first = nn.Linear(7, 7, bias=False)
        self.second = nn.Linear(7, 7, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7).eval()
        self.norm.running_mean = torch.randn(7)
        self.turned = nn.Parameter(torch.randn(6, 7).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.plain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(self.inp(x))))
        return (self.second(x) @ self.turned * self.scale + self.frozen.sum()) * self.plain


def on_mesh(*ranks: Any) -> DeviceMesh:
    """Return a mesh of these ranks: of one axis, or of two if they come as rows."""
    is_hybrid = not isinstance(ranks[0], int)
    names = ("replicate", "shard") if is_hybrid else ("shard",)
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


def is_in(mesh: DeviceMesh) -> bool:
    return dist.get_rank() in mesh.mesh.flatten().tolist()


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.shape == (7, 5) else None


def sharded(mesh: DeviceMesh, device: str = "cpu", **kwargs: Any) -> Odd:
    torch.manual_seed(3)
    with torch.device(device):
        model = Odd()
    kwargs |= {"mesh": mesh, "shard_placement_fn": by_columns}
    fully_shard(model.inp, **kwargs)
    return fully_shard(model, ignored_params={model.plain}, **kwargs)


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def in_flat(model: nn.Module) -> torch.optim.Optimizer:
    return flat(stock(model))


def of_layouts(model: nn.Module) -> torch.optim.Optimizer:
    return with_layout(
        model,
        {
            "*.weight": Owned(partial(torch.optim.Adagrad, lr=0.02)),
            "*": Sharded(partial(torch.optim.AdamW, lr=0.01)),
        },
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "stock": stock,
    "flat": in_flat,
    "layouts": of_layouts,
}


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator)


def train(model: Odd, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        model.plain.grad = torch.full((6,), step + 1.0)  # the same on all ranks
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states, optims = get_state_dict(model, optimizer)
    return {"model": states, "optimizer": optims}


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all that this rank has, by name."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name} {key}", inner)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found[name] = local.detach().clone()
        else:
            found[name] = torch.tensor(hash(str(value)))

    add("", model.state_dict())
    add("", optimizer.state_dict()["state"])
    return found


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.stride() == other[name].stride(), name


def from_disk(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    meshes: tuple[DeviceMesh, DeviceMesh],
    folder: Path,
    make: str,
) -> tuple[Odd | None, torch.optim.Optimizer | None]:
    """Save on one mesh and load on another one."""
    before, after = meshes
    groups = [dist.new_group(mesh.mesh.flatten().tolist()) for mesh in meshes]
    if is_in(before):
        dcp.save(saved(model, optimizer), checkpoint_id=folder, process_group=groups[0])
    dist.barrier()
    if not is_in(after):
        return None, None
    loaded = sharded(after)
    with torch.no_grad():
        for param in loaded.parameters():
            param.zero_()
    optim = OPTIMIZERS[make](loaded)
    train(loaded, optim, 99)  # for states to load into
    state = saved(loaded, optim)
    dcp.load(state, checkpoint_id=folder, process_group=groups[1])
    set_state_dict(
        loaded, optim, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return loaded, optim


ROUTES = {
    "4 to 2": [(0, 1, 2, 3), (1, 2)],
    "2 to 4": [(1, 3), (0, 1, 2, 3)],
    "to hybrid": [(0, 1, 2, 3), ((0, 1), (2, 3))],
    "from hybrid": [((0, 1), (2, 3)), (0, 1, 2)],
    "4 to 2 to 3": [(0, 1, 2, 3), (0, 2), (1, 2, 3)],
    "elsewhere": [(0, 1), (2, 3)],
    "the same": [(0, 1, 2, 3), (0, 1, 2, 3)],
}


@pytest.mark.parametrize("make", ["stock", "flat", "layouts"])
@pytest.mark.parametrize("route", list(ROUTES))
@on_ranks(4, timeout=60.0)
def test_training_goes_on_as_from_a_checkpoint(route: str, make: str, tmp_path: Path) -> None:
    """Whoever joins for the first time has the model on the meta device."""
    meshes = [on_mesh(*ranks) for ranks in ROUTES[route]]
    first = next(mesh for mesh in meshes if is_in(mesh))
    model = sharded(first, "cpu" if is_in(meshes[0]) else "meta")
    optimizer = OPTIMIZERS[make](model)
    if is_in(meshes[0]):
        train(model, optimizer, 0, 1)
        optimizer.param_groups[0]["lr"] *= 0.5
    names = [id(param) for param in model.parameters()]
    for number, pair in enumerate(pairwise(meshes)):
        disk, disk_optimizer = from_disk(model, optimizer, pair, tmp_path / str(number), make)
        move(model, optimizer, pair[1], bucket_nbytes=200)
        assert [id(param) for param in model.parameters()] == names
        if disk is None or disk_optimizer is None:
            with pytest.raises(ShardError, match="on other ranks"):
                model(batch(0))
            continue
        assert_same_bits(values(model, optimizer), values(disk, disk_optimizer))
        steps = (10 * number + 2, 10 * number + 3)
        assert train(model, optimizer, *steps) == train(disk, disk_optimizer, *steps)
        assert_same_bits(values(model, optimizer), values(disk, disk_optimizer))
