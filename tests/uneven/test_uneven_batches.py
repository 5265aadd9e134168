"""Ranks with different numbers of batches train like one process with all of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launches import counted
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training.cases import reproducible

from composable_shard import clip_grad_norm_, sit_out, uneven
from composable_shard.errors import CommunicationError
from composable_shard.testing import RankError, run_ranks, shard_children

WIDTH = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def sharded(whole: Model, num_replicas: int = 1) -> Any:
    shape = (num_replicas, dist.get_world_size() // num_replicas)[num_replicas == 1 :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
    return shard_children(copy.deepcopy(whole), mesh=mesh)


def batch_of(*place: int) -> torch.Tensor:
    seed = sum(value * 50**position for position, value in enumerate(place))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


Counts = list[list[list[int]]]
"""Of each epoch and rank, how many microbatches each of its steps has."""


def trainers(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def check(counts: Counts, num_replicas: int) -> None:
    torch.manual_seed(0)
    whole = Model().double()
    model = sharded(whole, num_replicas)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    optimizer, schedule = trainers(model)
    norms, evaluated = [], []
    for epoch, of_ranks in enumerate(counts):
        steps = [
            [batch_of(epoch, rank, step, micro) for micro in range(number)]
            for step, number in enumerate(of_ranks[rank])
        ]
        for microbatches in uneven(model, steps):
            turns = uneven(model, microbatches or [])
            for batch in turns:
                model.set_requires_gradient_sync(turns.is_last)
                loss = sit_out(model) if batch is None else model(batch).square().mean()
                loss.backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for microbatches in uneven(model, steps[:1]):
                given = microbatches[0] if microbatches else None
                evaluated.append(sit_out(model) if given is None else model(given).sum())
    expected = train_whole(whole, counts, num_ranks)
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-11)
    for (name, one), (_, other) in zip(
        whole.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(other.full_tensor(), one, rtol=1e-9, atol=1e-11, msg=name)


def train_whole(whole: Model, counts: Counts, num_ranks: int) -> list[float]:
    """Train one process with the batches of all; return the norms of its gradients."""
    optimizer, schedule = trainers(whole)
    norms = []
    for epoch, of_ranks in enumerate(counts):
        for step in range(max(map(len, of_ranks))):
            numbers = [steps[step] if step < len(steps) else 0 for steps in of_ranks]
            for rank, number in enumerate(numbers):
                for micro in range(number):
                    loss = whole(batch_of(epoch, rank, step, micro)).square().mean() / num_ranks
                    loss.backward()
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return norms


steps = st.lists(st.integers(0, 3), max_size=3)


@reproducible(40)
@given(
    drawn=st.sampled_from([(2, 1), (3, 1), (4, 2)]).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.lists(steps, min_size=shape[0], max_size=shape[0]), min_size=1, max_size=2),
        )
    )
)
def test_any_numbers_of_batches_train_like_one_process(
    drawn: tuple[tuple[int, int], Counts],
) -> None:
    (num_ranks, num_replicas), counts = drawn
    run_ranks(check, num_ranks, counts, num_replicas, timeout=60)


@on_ranks(2)
def test_each_turn_costs_one_small_all_reduce_launched_a_turn_ahead() -> None:
    one = "c10d.allreduce_.default"
    loop = iter(uneven(sharded(Model(), 1), range(2 - dist.get_rank())))
    for expected in ([one, one], [one]):
        with counted() as launched:
            next(loop)
        assert launched == expected
    with counted() as launched:
        assert next(loop, "end") == "end"
    assert launched == []


def failing(bad: str) -> None:
    def batches() -> Iterator[Any]:
        yield torch.ones(2, WIDTH)
        if dist.get_rank() == 1 and bad == "raises":
            raise OSError("no such file")
        yield None if dist.get_rank() == 1 else torch.ones(2, WIDTH)

    model = sharded(Model(), 1)
    begin = time.monotonic()
    try:
        for batch in uneven(model, batches()):
            (sit_out(model) if batch is None else model(batch).sum()).backward()
    finally:
        assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        ("raises", OSError, "no such file"),
        (
            "gives None",
            ValueError,
            "Expected batches that are not None, since None means no batch",
        ),
    ],
)
def test_batches_that_fail_on_one_rank_are_an_error_on_all(
    bad: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(failing, 3, bad, timeout=45)
    told = [(one.rank, one.exception_type, one.message) for one in caught.value.failures]
    others = (CommunicationError, "Rank 1 failed while taking its next batch")
    assert told == [(0, *others), (1, kind, text), (2, *others)]
