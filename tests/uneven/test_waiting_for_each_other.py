"""Ranks that leave out what others do, without a word, are an error on all ranks within seconds."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import fully_shard
from composable_shard.core.transport import failures
from composable_shard.core.transport.failures import Wait, count_launch, find_deadlock
from composable_shard.errors import CommunicationError
from composable_shard.testing import RankError, fake_ranks, run_ranks

# What is known of waits. Pure ---------------------------------------------------------------------


def wait(key: str, number: int, **launched: int) -> Wait:
    return Wait(f"gathering {key}", key, number, launched)


def test_ranks_that_wait_in_a_circle_wait_for_ever() -> None:
    """One that waits for an earlier collective, or computes, may come."""
    waits = {0: wait("a", 2, a=2, b=1), 1: wait("b", 2, a=1, b=2)}
    assert [find_deadlock(rank, waits) for rank in range(2)] == [1, 0]
    assert find_deadlock(0, {0: wait("a", 2, a=2, b=1), 1: wait("b", 1, a=1, b=1)}) is None
    assert find_deadlock(0, {0: wait("a", 2, a=2)}) is None
    waits = {0: wait("a", 1, a=1, b=1), 1: wait("b", 1, b=1, c=1), 2: wait("c", 1, c=1, a=1)}
    assert [find_deadlock(rank, waits) for rank in range(3)] == [1, 2, 0]
    waits[2] = wait("c", 1, a=1, b=1, c=1)  # so rank 1 goes on
    assert [find_deadlock(rank, waits) for rank in range(3)] == [None, None, None]


def test_of_ranks_with_several_threads_nothing_is_known() -> None:
    """Another thread may launch what this one is waited for."""
    with fake_ranks(2):
        group = dist.new_group([0, 1])
        assert [count_launch(group, "a"), count_launch(group, "b"), count_launch(group, "a")] == [
            *(1, 1, 2)
        ]
        with ThreadPoolExecutor(1) as other:
            assert other.submit(count_launch, group, "a").result() == 0
        assert count_launch(group, "a") == 0
    waits = {0: wait("a", 0, a=2), 1: wait("b", 1, b=1)}
    assert [find_deadlock(rank, waits) for rank in range(2)] == [None, None]


@given(
    orders=st.lists(st.permutations("aabbc"), min_size=2, max_size=4),
    come=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_what_is_said_never_to_come_does_not(orders: list[list[str]], come: list[int]) -> None:
    """Against playing it out: each rank launches in its order, and waits for each before the next.

    Some ranks have not said anything yet, and are somewhere; nobody is accused wrongly.
    """
    done = play(orders, [0] * len(orders))
    start = play(orders, [min(at, end) for at, end in zip(come, done, strict=False)], num_moves=0)
    waits = {}
    for rank, (order, at) in enumerate(zip(orders, start, strict=True)):
        if at < len(order):
            counts: dict[str, int] = {}
            for key in order[: at + 1]:
                counts[key] = counts.get(key, 0) + 1
            waits[rank] = Wait("", order[at], counts[order[at]], counts)
    for rank in waits:
        if find_deadlock(rank, waits) is not None:
            assert done[rank] < len(orders[rank])


def play(orders: list[list[str]], at: list[int], num_moves: int = 1000) -> list[int]:
    """Return how far each rank comes: past a collective when all have launched it."""
    at = list(at)
    for _ in range(num_moves):
        launched = [
            {key: order[: here + 1].count(key) for key in "abc"}
            for order, here in zip(orders, at, strict=True)
        ]
        free = [
            rank
            for rank, (order, here) in enumerate(zip(orders, at, strict=True))
            if here < len(order)
            and all(one[order[here]] >= launched[rank][order[here]] for one in launched)
        ]
        if not free:
            break
        for rank in free:
            at[rank] += 1
    return at


# Ranks --------------------------------------------------------------------------------------------


PARTED = (
    "Expected all ranks to run the same collective, got rank {} {} and rank {} {}; the cause may "
    "be evaluation, generation or saving on some ranks only, or a branch that only some ranks take"
    "; run the same on all ranks, or call sit_out(module) on ranks without input for a module"
)


IMPATIENT = mock.patch.multiple(failures, _POLL_AFTER=0.2, _STORE_TIMEOUT=0.4)


class Towers(nn.Module):
    """A trunk, and a tower that not every batch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.text = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, has_images: bool) -> torch.Tensor:
        return self.text(self.vision(x) if has_images else x)


def train(skips: int, num_known: int, num_replicas: int = 1) -> None:
    shape = (num_replicas, dist.get_world_size() // num_replicas)[num_replicas == 1 :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
    torch.manual_seed(0)
    model: Any = Towers()
    for layer in (*model.vision, model.text, model):
        fully_shard(layer, mesh=mesh)
    for _ in range(num_known):
        model(torch.ones(2, 4), True).sum().backward()
    begin = time.monotonic()
    try:
        with IMPATIENT:
            for _ in range(3):
                model(torch.ones(2, 4), dist.get_rank() != skips).sum().backward()
    finally:
        assert time.monotonic() - begin < 30


@pytest.mark.brief(2)
@pytest.mark.parametrize("num_known", [2, 0])
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(4, 2), (2, 1), (3, 1)])
def test_a_module_that_one_rank_leaves_out(
    num_ranks: int, num_replicas: int, num_known: int
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(train, num_ranks, num_ranks - 1, num_known, num_replicas, timeout=45)
    said = caught.value.failures
    assert len(said) == num_ranks
    assert {failure.exception_type for failure in said} == {CommunicationError}
    last = num_ranks - 1
    text, vision = "gathering group 'text'", "gathering group 'vision.0'"
    parted = {PARTED.format(rank, vision, last, text) for rank in range(last)}
    for failure in said:  # each has found it, or has heard of it from one that has
        start, _, found = failure.message.partition(": ")
        assert start.startswith(f"Rank {failure.rank} failed while ")
        assert found in parted


def evaluate_on_rank_0() -> None:
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4)))
    fully_shard(model)
    with IMPATIENT:
        model(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4))


def test_evaluation_on_rank_0_alone_is_one_sentence_on_all_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(evaluate_on_rank_0, 2, timeout=45)
    ops = "gathering group '1'", "reducing the gradients of group '1'"
    assert [failure.message for failure in caught.value.failures] == [
        f"Rank {rank} failed while {op}: {PARTED.format(0, ops[0], 1, ops[1])}"
        for rank, op in enumerate(ops)
    ]
