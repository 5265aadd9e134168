"""A rank that is lost while encoded gradients are exchanged: the others name what they were at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from faults.breaking import (
    BAD,
    End,
    at_launch,
    failures,
    kill_this_rank,
    mesh_of_its_own,
    sleep_too_long,
    step,
)
from torch import nn

from composable_shard import fully_shard
from subclasses.lossless import Lossless, as_type

REDUCING = "reducing the gradients of group '0'"


def lost(fault: Callable[[], Any], is_end: bool) -> None:
    mesh = mesh_of_its_own()
    model = nn.Sequential(as_type(nn.Linear(8, 8), Lossless))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model)
    wait = End().wait if is_end else bool
    with at_launch(REDUCING, before=fault if dist.get_rank() == BAD else wait):
        step(model)


@pytest.mark.parametrize(
    "fault", [kill_this_rank, pytest.param(sleep_too_long, marks=pytest.mark.matrix)]
)
def test_the_group_is_named_when_a_rank_is_lost(fault: Callable[[], Any]) -> None:
    said = failures(lost, 2, fault, fault is kill_this_rank, apart=False)
    assert said[0].startswith(f"CommunicationError: Rank 0 failed while {REDUCING}: ")
    if fault is kill_this_rank:
        assert said[BAD] == "RuntimeError: The process ended during the call, exit code -9"
    else:  # the others are gone when it comes
        assert said[BAD].startswith(f"CommunicationError: Rank {BAD} failed while {REDUCING}: ")
