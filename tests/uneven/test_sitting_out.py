"""A rank that sits out a module trains as if its batch had nothing for it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import counted
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard, sit_out
from composable_shard.errors import ShardError
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, shard_children


def layers(count: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


COMMUNICATION = "all_gather", "wait_for_all_gather", "reduce_scatter", "wait_for_reduce_scatter"


@on_ranks(2)
def test_a_rank_that_sits_out_has_the_events_of_one_that_computes() -> None:
    """Gathers, prefetches and reductions, in the same order; nothing is gathered twice."""
    model = shard_children(layers())
    told = []
    for computes in (True, True, dist.get_rank() == 0):
        with counted() as launched, record_events(model, *COMMUNICATION) as events:
            (model(torch.ones(2, 4)).sum() if computes else sit_out(model)).backward()
        told.append((list(events), launched))
    assert told[2] == told[1]
    assert ("all_gather", "1") in told[2][0] and ("reduce_scatter", "0") in told[2][0]


@pytest.mark.parametrize("is_known", [False, True])
@on_ranks(2)
def test_trees_in_a_container_are_sat_out_together(is_known: bool) -> None:
    """Each of them as it was called last, or as far as it is known, in the order of the modules."""
    rank = dist.get_rank()
    whole = nn.Sequential(layers(2), layers(3))
    model: Any = copy.deepcopy(whole)
    for tower in model:
        shard_children(tower)
    if is_known:
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    (sit_out(model) if rank == 1 else model(torch.ones(2, 4)).sum()).backward()
    (whole(torch.ones(2, 4)).sum() / 2).backward()
    for got, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)


@on_ranks(3)
def test_what_nobody_runs_gets_no_gradient() -> None:
    model = shard_children(layers())
    sit_out(model).backward()
    assert [param.grad for param in model.parameters()] == [None] * 6


@on_ranks(2)
def test_in_evaluation_the_zero_has_no_backward_and_nothing_stays_gathered() -> None:
    model = shard_children(layers())
    with torch.no_grad():
        zero = sit_out(model) if dist.get_rank() == 1 else model(torch.ones(2, 4)).sum() * 0
    assert zero.item() == 0 and not zero.requires_grad
    with record_events(model, "all_gather") as events, torch.no_grad():
        model(torch.ones(2, 4))
    assert [group for _, group in events] == ["0", "1", "2"]


class Reused(nn.Module):
    """A container, not sharded itself, of a layer that it calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


def test_several_calls_inside_of_a_container_are_told_apart_by_sharding_it() -> None:
    with fake_ranks(2):
        model = nn.Sequential(Reused(), nn.Linear(4, 4))
        fully_shard(model[0].layer)
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        expected = (
            "Expected a module to sit out that is sharded itself, got Reused, which calls a "
            "sharded module several times; call sit_out() for each of these calls"
        )
        with pytest.raises(ShardError, match=re.escape(expected)):
            sit_out(model[0])
        model = fully_shard(nn.Sequential(fully_shard(Reused()), nn.Linear(4, 4)))
        model(torch.ones(2, 4)).sum().backward()
        assert sit_out(model[0]).item() == 0
