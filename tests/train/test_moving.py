"""Moving a model to other ranks gives what a checkpoint on disk gives, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from training.cases import reproducible

from composable_shard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardError,
    clip_grad_norm_,
    fully_shard,
    move,
    parked,
    unsharded,
)
from composable_shard.optim.blocks import Box
from composable_shard.testing import RankError, run_ranks
from composable_shard.train import moving
from composable_shard.train.places import Ground, Piece, cut_box, pieces_of, rounds_of
from train.moved import (
    OPTIMIZERS,
    as_device,
    assert_same_bits,
    follow_a_route,
    is_in,
    on_mesh,
    stock,
    values,
)

# PURE ---------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def grounds(draw: st.DrawFn) -> Ground:
    """Some of six ranks, in any order, as a mesh of one axis or of two."""
    extents = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 1), (1, 3), (2, 2), (3, 2)]))
    count = extents[0] * (extents[1] if len(extents) == 2 else 1)
    ranks = draw(st.permutations(range(6)))[:count]
    return Ground(tuple(ranks), extents, roles_of(extents))


def roles_of(extents: Sequence[int]) -> tuple[Literal["replicate", "shard"], ...]:
    return ("shard",) if len(extents) == 1 else ("replicate", "shard")


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
    boxes = [ground.spread(shape, dim).boxes for ground in (before, after)]
    have = dict(zip(before.ranks, boxes[0], strict=True))
    want = dict(zip(after.ranks, boxes[1], strict=True))
    pieces = pieces_of(5, shape, dim, before, after)
    assert all(piece.tensor == 5 for piece in pieces)
    for rank in range(6):
        got = [one for piece in pieces if piece.target == rank for one in elements(piece.box)]
        assert len(got) == len(set(got))
        assert set(got) == (elements(want[rank]) if rank in want else set())
    for piece in pieces:
        assert elements(piece.box) <= elements(have[piece.source])
    for rank in have.keys() & want.keys():  # what a rank has is not sent to it
        sent = {e for p in pieces if p.target == rank != p.source for e in elements(p.box)}
        assert not sent & elements(have[rank])


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
            assert 2 * out + into <= nbytes
    for piece in pieces:
        parts = [p.box for some in rounds for p in some if p.tensor == piece.tensor]
        assert [e for box in parts for e in sorted(elements(box))] == sorted(elements(piece.box))


# On ranks -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Uneven parameters; on an inner dim, transposed, tied, frozen, scalar, and not sharded."""

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


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.shape == (7, 5) else None


def sharded(mesh: DeviceMesh, device: str = "cpu", **kwargs: Any) -> Odd:
    torch.manual_seed(3)
    with torch.device(device):
        model = Odd()
    kwargs |= {"mesh": mesh, "shard_placement_fn": by_columns}
    fully_shard(model.inp, **kwargs)
    return fully_shard(model, ignored_params={model.plain}, **kwargs)


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
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


ROUTES = {
    "2 to 4": [(1, 3), (0, 1, 2, 3)],
    "to hybrid": [(0, 1, 2, 3), ((0, 1), (2, 3))],
    "from hybrid": [((0, 1), (2, 3)), (0, 1, 2)],
    "4 to 2 to 3": [(0, 1, 2, 3), (0, 2), (1, 2, 3)],
    "elsewhere": [(0, 1), (2, 3)],
    "the same": [(0, 1, 2, 3), (0, 1, 2, 3)],
}


@pytest.mark.brief(3)
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("route", ROUTES)
@on_ranks(4)
def test_training_goes_on_as_from_a_checkpoint(route: str, make: str, tmp_path: Path) -> None:
    """Whoever joins for the first time has the model on the meta device."""
    meshes = [on_mesh(*ranks) for ranks in ROUTES[route]]
    first = next(mesh for mesh in meshes if is_in(mesh))
    model = sharded(first, "cpu" if is_in(meshes[0]) else "meta")
    optimizer = OPTIMIZERS[make](model)
    if is_in(meshes[0]):
        train(model, optimizer, 0, 1)
        optimizer.param_groups[0]["lr"] *= 0.5

    def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        loaded = sharded(mesh)
        optim = OPTIMIZERS[make](loaded)
        train(loaded, optim, 99)
        return loaded, optim

    follow_a_route(model, optimizer, meshes, is_in, build, train, tmp_path)


def losses(model: Odd, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run a backward whose gradients do not depend on which ranks there are."""
    optimizer.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(4, 5)).square().mean().backward()
    model.plain.grad = torch.full((6,), step + 1.0)


@pytest.mark.parametrize("name", ["plain", "offloaded", "bf16"])
@on_ranks(2)
def test_gradients_and_what_hangs_on_parameters_move(name: str) -> None:
    """A step after the move is the move after the step, and everything else is still there."""
    pairs, one = on_mesh((0,), (1,)), on_mesh(0, 1)
    kwargs: dict[str, Any] = {}
    if name == "offloaded":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if name == "bf16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = [sharded(one, **kwargs) for _ in range(2)]
    optimizers = [stock(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        losses(model, optimizer, 0)
        optimizer.step()
        losses(model, optimizer, 1)
    (model, other), (optimizer, _) = models, optimizers
    weight = model.inp.weight
    weight.tag = "of the user"
    hooked: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda _: hooked.append("weight"))
    model.set_reshard_after_forward(False)
    grads = {name: param.grad for name, param in model.named_parameters()}
    move(model, optimizer, pairs)
    for key, param in model.named_parameters():
        assert param.grad is grads[key]
        if isinstance(param, DTensor):
            assert param.device_mesh == pairs
            if param.grad is not None:
                assert param.grad.placements == param.placements
    optimizers[0].step()
    optimizers[1].step()
    move(other, optimizers[1], pairs)
    assert_same_bits(values(model, optimizer), values(other, optimizers[1]))
    assert model.inp.weight is weight and weight.tag == "of the user"
    losses(model, optimizer, 2)
    assert hooked == ["weight"]
    assert model.inp.weight.grad is not None
    model.set_reshard_after_forward(True)
    for index, back in enumerate(models):
        move(back, optimizers[index], one)
    assert_same_bits(values(model, optimizer), values(other, optimizers[1]))


# What is refused ----------------------------------------------------------------------------------


def entered(context: Any, model: Odd, mesh: DeviceMesh) -> None:
    with context:
        move(model, (), mesh)


def in_forward(model: Odd, mesh: DeviceMesh) -> None:
    model.inp.register_forward_hook(lambda *_: move(model, (), mesh))
    model(batch(0))


def after_backward(model: Odd, mesh: DeviceMesh, accumulates: bool) -> None:
    model.set_is_last_backward(accumulates)
    model.set_requires_gradient_sync(not accumulates)
    model(batch(0)).sum().backward()
    move(model, (), mesh)


def of_neighbours(_: Odd, mesh: DeviceMesh) -> None:
    layer = fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=2)
    move(layer, (), on_mesh((0,), (1,), (2,), (3,)))


def of_other_shape(model: Odd, mesh: DeviceMesh) -> None:
    optimizer = stock(model)
    train(model, optimizer, 0)
    state = optimizer.state[model.inp.weight]
    state["exp_avg"] = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    move(model, optimizer, mesh)


REFUSED: dict[str, Callable[[Odd, DeviceMesh], None]] = {
    "ShardError: Expected move() for the root group outside of forward and backward, got a call "
    "inside of one; use it between iterations": in_forward,
    "ShardError: Expected move() outside of unsharded(), got a call inside of unsharded() of the "
    "root group; leave that context first": lambda m, mesh: entered(unsharded(m), m, mesh),
    "ShardError: Expected shards of the root group in memory to be moved, got them parked; leave "
    "the context of parked() first": lambda model, mesh: entered(parked(model), model, mesh),
    "ShardError: Expected no reductions of the root group in flight, got some; end "
    "backward": partial(after_backward, accumulates=False),
    "ShardError: Expected a reduced gradient of 'turned', got one that was accumulated without "
    "sync; call synchronize_gradients() first": partial(after_backward, accumulates=True),
    "Expected a model with sharded modules, got none in Linear; apply fully_shard before move()": (
        lambda _, mesh: move(nn.Linear(2, 2), (), mesh)
    ),
    "ValueError: Expected reshard_after_forward to divide the number of shards, got 2 for 1 "
    "shards": of_neighbours,
    "Expected the model on all ranks of its meshes, and without values on the others, got "
    "ranks [] and meshes of ranks []": lambda _, mesh: move(sharded(mesh, "meta"), (), mesh),
    "ShardError: Expected state 'exp_avg' of 'weight' to be cut by fully_shard alone, into plain "
    "tensors along one axis of a mesh, got [2, 2] of [2, 2], (Partial(sum),) on "
    "DeviceMesh((shard=2), 'cpu', stride=(1,)); save a checkpoint instead": of_other_shape,
}


def refused(message: str) -> None:
    mesh = on_mesh(*range(dist.get_world_size()))
    with as_device():
        REFUSED[message](sharded(mesh), mesh)


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(refused, 4 if REFUSED[message] is of_neighbours else 2, message)
    failure = caught.value.agreed()
    begin = "Expected no failure while moving a model, got on rank 0: "
    expected = message if message.startswith("Expected") else begin + message
    assert (failure.type_name, failure.message) == ("ShardError", expected)


@on_ranks(2)
def test_a_mesh_some_of_whose_ranks_do_not_call_is_refused() -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([other]) for other in range(2)][rank]
    layer = fully_shard(nn.Linear(2, 2), mesh=[on_mesh(0), on_mesh(1)][rank])
    with pytest.raises(ShardError) as caught:
        move(layer, (), on_mesh(0, 1), process_group=alone)
    assert str(caught.value) == (
        f"Expected all ranks of the mesh to call move() with it, got ranks [{rank}] and meshes of "
        "ranks [0, 1]"
    )


# Faults -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_rank_that_fails_leaves_all_as_it_was() -> None:
    models = [sharded(on_mesh(0, 1)) for _ in range(2)]
    pairs = [(model, stock(model)) for model in models]
    for model, optimizer in pairs:
        train(model, optimizer, 0)
    before = values(*pairs[0])
    real, calls = moving.build_buckets, list[int]()

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise MemoryError("no more")
        return real(*args)

    with mock.patch.object(moving, "build_buckets", fails), pytest.raises(ShardError) as caught:
        move(*pairs[0], on_mesh((0,), (1,)))
    assert str(caught.value) == (
        "Expected no failure while moving a model, got on rank 1: MemoryError: no more"
    )
    assert_same_bits(values(*pairs[0]), before)
    for model, optimizer in pairs:
        train(model, optimizer, 1)
    assert_same_bits(values(*pairs[0]), values(*pairs[1]))
