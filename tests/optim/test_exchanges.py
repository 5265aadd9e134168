"""What a step sends: how many all-to-alls of how many bytes, and nothing where nothing need be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from composable_shard.optim.blocks import Block, blocks_of, owned_buckets, spread_over
from composable_shard.testing import run_ranks
from optim.whole import (
    Oracle,
    Rotated,
    Spec,
    assert_equal,
    follow,
    optimizer_of,
    set_gradients,
    sharded,
)


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
    assert sorted(block.key for block in owned) == [block.key for block in blocks]
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
        for rank in spread.sources(owner):
            rows, columns = (
                slice(start, start + size)
                for start, size in zip(
                    spread.boxes[rank].starts, spread.boxes[rank].sizes, strict=True
                )
            )
            seen[rows, columns] += 1
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
