"""Whole matrices on sharded parameters, bit by bit as by stock optimizers on unsharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import own_input, two_nets
from on_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training.cases import reproducible

from composable_shard.optim import Owned, Sharded, with_layout
from composable_shard.optim.blocks import Block, blocks_of, owned_buckets, spread_over
from composable_shard.optim.exchange import part_of
from composable_shard.testing import run_ranks
from optim.whole import (
    EXTENTS,
    Oracle,
    Rotated,
    Spec,
    adamw,
    assert_equal,
    assert_states_equal,
    follow,
    momentum,
    muon,
    num_ranks_of,
    optimizer_of,
    set_gradients,
    sharded,
    spec_lists,
)

SPECS = [
    Spec((8, 6)),
    Spec((5, 7)),
    Spec((7, 3), dim=1),
    Spec((1, 9)),
    Spec((12, 4), (4, 4, 4)),
    Spec((3, 5), "sharded"),
    Spec((4, 6, 5)),
    Spec((3, 6, 5), (2, 4)),
    Spec((2, 6, 5), dim=1),
    Spec((6,), "sharded"),
    Spec((6, 8)),
]


# Bits ----------------------------------------------------------------------------------------


def train(
    specs: Sequence[Spec],
    extents: Sequence[int],
    all_bucket_nbytes: Sequence[int],
    stock: Any = muon,
    ranks: Sequence[Sequence[int]] = (),
) -> None:
    for bucket_nbytes in all_bucket_nbytes:
        model, oracle = sharded(specs, extents, ranks=ranks), Oracle(specs, stock)
        optimizer = optimizer_of(model, specs, stock, bucket_nbytes=bucket_nbytes)
        for step in range(3):
            without = [step] if step < len(specs) else []
            set_gradients(model, step, without)
            oracle.set_gradients(step, without)
            optimizer.step()
            oracle.step()
            assert_equal(model, oracle)
        assert_states_equal(get_optimizer_state_dict(model, optimizer)["state"], oracle)


def test_a_mesh_whose_rows_are_interleaved() -> None:
    """Its process group sorts the ranks; their places on the mesh are in another order."""
    run_ranks(train, 4, SPECS, (2, 2), [1, 300, 2**26], ranks=[[0, 2], [1, 3]])


@reproducible(16)
@given(spec_lists, st.sampled_from(EXTENTS), st.sampled_from([1, 200, 2**26]), st.booleans())
def test_generated_parameters(
    specs: list[Spec], extents: tuple[int, ...], bucket_nbytes: int, is_muon: bool
) -> None:
    stock = muon if is_muon else momentum
    run_ranks(train, num_ranks_of(extents), specs, extents, [bucket_nbytes], stock)


# Training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_training_with_schedules_clipping_and_accumulation() -> None:
    reference, model = two_nets()
    layouts = {lambda name, param: param.ndim == 2: Owned(muon), "*": Sharded(adamw)}
    optimizer = with_layout(model, layouts)
    params = list(reference.parameters())
    stock = [muon([p for p in params if p.ndim == 2]), adamw([p for p in params if p.ndim != 2])]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, *stock)]
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(own_input(step * 2 + micro)).square().sum().backward()
        model.clip_grad_norm_(0.5)
        for param, other in zip(model.parameters(), params, strict=True):
            other.grad = param.grad.full_tensor()  # to the bit, whatever the order of sums
        for one in (optimizer, *stock):
            one.step()
            one.zero_grad()
        for schedule in schedules:
            schedule.step()
        for param, other in zip(model.parameters(), params, strict=True):
            assert param.grad is None
            assert torch.equal(param.full_tensor(), other)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 0.01 / 8]


# What a step sends --------------------------------------------------------------------------------


def sent_by_steps(specs: Sequence[Spec], extents: Sequence[int], nbytes: int) -> list[int]:
    sent = follow(sharded(specs, extents), specs, bucket_nbytes=nbytes)
    return [one.nbytes or 0 for one in sent]


EVEN = [Spec((8, 8)) for _ in range(4)]


@pytest.mark.parametrize(
    ("num_ranks", "nbytes", "num_buckets"), [(2, 2**20, 1), (4, 2**20, 1), (4, 512, 2), (2, 1, 4)]
)
def test_two_all_to_alls_for_each_bucket(num_ranks: int, nbytes: int, num_buckets: int) -> None:
    found = run_ranks(sent_by_steps, num_ranks, EVEN, (num_ranks,), nbytes)
    assert [len(sent) for sent in found] == [2 * num_buckets] * num_ranks
    # Values and gradients go to one owner, and values come back; what owners hold does not move.
    moved = 3 * sum(torch.Size(spec.shape).numel() for spec in EVEN) * 4
    assert sum(map(sum, found)) == moved * (num_ranks - 1) // num_ranks


@pytest.mark.parametrize("extents", [(1,), (2,), (4,)])
def test_matrices_that_lie_whole_on_a_rank_stay_there(extents: tuple[int, ...]) -> None:
    specs = [Spec((4, 6, 5)), Spec((8, 3, 4)), Spec((5, 5), "sharded")]
    assert run_ranks(sent_by_steps, extents[0], specs, extents, 2**20) == [[]] * extents[0]


# Owners ------------------------------------------------------------------------------------------

shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30)


@given(shapes, st.integers(1, 6), st.integers(1, 4000))
def test_owners_are_balanced_and_buckets_are_complete(
    some: list[tuple[int, int]], num_ranks: int, nbytes: int
) -> None:
    blocks = [
        Block(place, 0, box, spread_over(shape, (num_ranks,), (0,)), itemsize=4)
        for place, shape in enumerate(some)
        for box in blocks_of(shape)
    ]
    loads = [0] * num_ranks
    buckets = owned_buckets(blocks, loads, nbytes)
    owned = [block for bucket in buckets for block in bucket]
    assert all(block.owner in block.candidates for block in owned)
    if all(len(block.candidates) == num_ranks for block in blocks):
        assert max(loads) - min(loads) <= max(block.cost for block in blocks)
    assert sorted(block.param for block in owned) == [block.param for block in blocks]
    for bucket in buckets:
        assert len(bucket) == 1 or sum(4 * block.box.numel for block in bucket) <= nbytes


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([((3,), (0,)), ((2, 2), (None, 1)), ((2, 2), (0, 1)), ((2, 2), (0, 0))]),
)
def test_each_replica_holds_everything_once(
    shape: tuple[int, int], mesh: tuple[tuple[int, ...], tuple[int | None, ...]]
) -> None:
    spread = spread_over(shape, *mesh)
    for owner in range(len(spread.boxes)):
        seen = torch.zeros(shape)
        for box, replica in zip(spread.boxes, spread.replicas, strict=True):
            if replica == spread.replicas[owner]:
                part_of(seen, box).add_(1)
        assert bool((seen == 1).all())


# Unusual states and parameters -------------------------------------------------------------------


ROTATED = [Spec((4, 6, 5)), Spec((6, 4), (2, 4)), Spec((5, 3)), Spec((3, 4), dim=1)]


def step_and_save(extents: Sequence[int], loaded: dict[str, Any] | None = None) -> dict[str, Any]:
    """Step, and train on from full states if there are any; return full states."""
    whole = StateDictOptions(full_state_dict=True)
    stock = partial(Rotated, lr=1e-3)
    model, oracle = sharded(ROTATED, extents), Oracle(ROTATED, stock)
    optimizer = optimizer_of(model, ROTATED, stock)
    for step in range(1 if loaded is None else 2):
        if step == 1:
            assert loaded is not None
            set_optimizer_state_dict(model, optimizer, loaded, options=whole)
        set_gradients(model, step)
        oracle.set_gradients(step)
        optimizer.step()
        oracle.step()
    assert_equal(model, oracle)
    return get_optimizer_state_dict(model, optimizer, options=whole)


@pytest.mark.parametrize("extents", [(1,), (2,), (3,), (2, 2)])
def test_states_of_shapes_of_their_own(extents: tuple[int, ...]) -> None:
    first = run_ranks(step_and_save, 2, (2,))[0]
    states = first["state"]
    assert set(states["p2"]) == {"left[0]", "step", "norm"}
    assert {"left[0]", "left[1]", "norm[0]", "norm[1]", "step"} == set(states["p1"])
    run_ranks(step_and_save, torch.Size(extents).numel(), extents, first)
