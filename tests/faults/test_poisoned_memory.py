"""What reads memory too early or too late is seen: memory is NaN before it is written and after.

Each fault is planted on every rank, and a comparison with the unsharded model must fail then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from composable_shard.core.transport.gloo.exchange import Exchange
from composable_shard.testing import RankError, run_ranks
from faults.poisoned import FAULTS, planted, train_and_compare


def train_with(name: str) -> str:
    """Return what the comparison says on this rank, which has trained to the end all the same."""
    fault = FAULTS[name]
    with planted(fault), late_reader():
        try:
            train_and_compare(fault.reshards)
        except AssertionError as error:
            return str(error)
    return ""


@contextlib.contextmanager
def late_reader() -> Iterator[None]:
    """Let rank 1 read the memory of others late, when they have gone on."""
    find = Exchange._find

    def late(self: Exchange, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return find(self, *args, **kwargs)

    with mock.patch.object(Exchange, "_find", late):
        yield


@pytest.mark.parametrize(("num_ranks", "reshards"), [(2, True), (4, 2)])
def test_the_library_as_it_is_trains_right(num_ranks: int, reshards: bool | int) -> None:
    run_ranks(train_and_compare, num_ranks, reshards)


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS.values():
        with planted(fault):
            pass


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    try:
        seen = any(run_ranks(train_with, FAULTS[name].num_ranks, name))
    except RankError as error:  # where what is read says nothing of itself that makes sense
        seen = "got an incomplete message" in str(error)
    assert seen
