"""A rank that is killed, or stands still: the others say who it was, at what, and do not hang.

All of it both ways: where ranks share memory, and where they send.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from near import Apart
from torch import nn

from composable_shard import CommunicationError, ShardError, fully_shard
from composable_shard.testing import run_ranks
from faults.breaking import (
    BAD,
    LIMIT,
    TIME_OUT,
    WHEREABOUTS,
    End,
    X,
    at_launch,
    failures,
    kill_this_rank,
    kill_this_rank_once_sent,
    layers,
    sleep_too_long,
    step,
    stop_this_rank,
)

pytestmark = pytest.mark.usefixtures("sharing")

KILLED = "RuntimeError: The process ended during the call, exit code -9"
REFUSED = "Expected a process group without failures, got one that had failed before: {}"
GATHERING, REDUCING = "gathering group '1'", "reducing the gradients of group '0'"
BATCHES = "if ranks have different numbers of batches, iterate with composable_shard.uneven()"
ENDED = f"the end of its process; {BATCHES}"
BOTH_WAYS = pytest.mark.parametrize("apart", [False, True], ids=["reading", "sending"])
READING = pytest.mark.parametrize(
    "apart", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["reading", "sending"]
)
BOTH_ACTS = pytest.mark.parametrize(("act", "count"), [(GATHERING, 3), (REDUCING, 1)])


def blames(rank: int, act: str, got: str) -> str:
    return (
        f"CommunicationError: Rank {rank} failed while {act}: Expected rank {BAD} to take part in "
        f"a collective, got {got}"
    )


def killed_before(act: str, count: int) -> None:
    model, end = layers(count), End()
    end_or_wait = kill_this_rank_once_sent if dist.get_rank() == BAD else end.wait
    with at_launch(act, before=end_or_wait):
        step(model)


@pytest.mark.brief(1)
@BOTH_WAYS
@BOTH_ACTS
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_a_rank_that_was_killed_before_a_collective_is_named_by_all(
    act: str, count: int, apart: bool, ranks: int
) -> None:
    """The sign of the end comes at once: with sockets too, where only the text differs."""
    said = failures(killed_before, ranks, act, count, apart=apart)
    assert said.pop(BAD) == KILLED
    assert list(said) == [rank for rank in range(ranks) if rank != BAD]
    for rank, text in said.items():
        if apart:
            assert text.startswith(blames(rank, act, "the error '"))
        else:
            assert text == blames(rank, act, ENDED)


def stalled(act: str, count: int, stall: Callable[[], None]) -> None:
    model = layers(count)
    with at_launch(act, before=stall if dist.get_rank() == BAD else bool):
        step(model)
    step(model)  # what the others had published for the first is there


@pytest.mark.brief(1)
@BOTH_WAYS
@BOTH_ACTS
def test_a_rank_that_is_late_is_named_and_finds_the_others_gone(
    act: str, count: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composable_shard.testing.ranks.GRACE", 30.0)  # it waits, too
    said = failures(stalled, 2, act, count, sleep_too_long, apart=apart)
    silence = f"no message within the time-out of {TIME_OUT} s"
    if apart:
        silence = f"the error 'Timed out waiting {TIME_OUT}000ms for recv operation to complete'"
    assert said[0] == blames(0, act, silence) + WHEREABOUTS
    assert said[BAD].startswith(f"CommunicationError: Rank {BAD} failed while ")
    assert "Expected rank 0 to take part in a collective, got " in said[BAD]


@READING
def test_a_rank_that_stands_still_is_named(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither will it end by itself, nor say where it stands.
    for patience in ("GRACE", "STACK_TIMEOUT"):
        monkeypatch.setattr(f"composable_shard.testing.ranks.{patience}", 0.5)
    said = failures(stalled, 2, REDUCING, 1, stop_this_rank, apart=apart)
    assert list(said) == [0]
    assert said[0].startswith(blames(0, REDUCING, ""))


def killed_at_first() -> None:
    """Kill a rank before the ranks have compared their models."""
    model = fully_shard(nn.Linear(8, 8))
    end = End()
    if dist.get_rank() == BAD:
        kill_this_rank()
    end.wait()
    model(X)


def test_a_rank_that_was_killed_before_the_first_gather() -> None:
    said = failures(killed_at_first, 2, apart=False)
    assert said.pop(BAD) == KILLED
    assert said[0].startswith(
        "CommunicationError: Rank 0 failed while comparing the model between ranks: "
    )


def waited_for_again() -> list[str]:
    """What a rank hears that goes on with a process group in which a gather has failed."""
    model = layers(1)
    said = []
    if dist.get_rank() != BAD:
        handle = model[0].unshard(async_op=True)
        with pytest.raises(CommunicationError) as first:
            handle.wait()
        assert isinstance(first.value.__cause__, ShardError)
        with pytest.raises(ShardError) as again:
            handle.wait()
        model.reset_iter_state()
        with pytest.raises(CommunicationError) as later:
            model(X)
        said = [str(caught.value) for caught in (first, again, later)]
        said.append(" ".join(type(param).__name__ for param in model.parameters()))
    else:
        time.sleep(TIME_OUT + 1)
    return said


@READING
def test_parameters_of_a_failed_gather_never_become_valid(apart: bool) -> None:
    fn = Apart(waited_for_again) if apart else waited_for_again
    (first, again, later, registered), _ = run_ranks(fn, 2, timeout=LIMIT)
    missed = "Expected rank 1 to take part in a collective, got "
    assert first.startswith(f"Rank 0 failed while gathering group '0': {missed}")
    assert again == (
        "Expected no earlier failure while gathering group '0', got a wait that failed or was "
        "interrupted; run the whole iteration again"
    )
    assert first.endswith(WHEREABOUTS)
    refused = REFUSED.format(first.partition(": ")[2].removesuffix(WHEREABOUTS))
    assert later == f"Rank 0 failed while gathering group '0': {refused}"
    assert registered == "DTensor DTensor"
