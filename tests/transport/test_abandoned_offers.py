"""What becomes of gathers and reductions that were launched and that nobody waits for any more."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from near import readable

from composable_shard.core.transport import failures, same_host
from composable_shard.core.transport.pending import Pending
from composable_shard.core.transport.point_to_point import DirectAllGather, DirectReduceScatter
from composable_shard.core.transport.same_host import LetterBox, Neighbour, Offer, neighbours
from composable_shard.testing import run_ranks

__all__ = ["readable"]

READ, WRITE = same_host.read, same_host.write
TAG = 1 << 30  # which no model of another test has
Launch = Callable[[float], tuple[torch.Tensor, Pending]]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def gather(start: float, tag: int = TAG) -> tuple[torch.Tensor, Pending]:
    """Gather from every rank `start` plus its number."""
    output = torch.empty(2 * dist.get_world_size())
    shard = torch.full((2,), start + dist.get_rank())
    return output, Pending(DirectAllGather().launch([output], [shard], world(), tag))


def reduce(start: float) -> tuple[torch.Tensor, Pending]:
    """Sum over the ranks `start` plus their numbers."""
    output, op = torch.empty(2), dist.ReduceOp.SUM
    full = torch.full((2 * dist.get_world_size(),), start + dist.get_rank())
    return output, Pending(DirectReduceScatter().launch([output], [full], world(), op, TAG))


def complete(launch: Launch) -> list[bool]:
    """Launch three, one after another, and wait; tell which are exact."""
    exact = []
    for start in (30.0, 40.0, 50.0):
        output, pending = launch(start)
        pending.wait()
        same_host.settle({TAG: "testing"})
        ranks = torch.arange(dist.get_world_size()) + start
        wanted = ranks.repeat_interleave(2) if launch is gather else ranks.sum().expand(2)
        exact.append(torch.equal(output, wanted))
    return exact


def held(group: dist.ProcessGroup | None = None) -> list[Offer]:
    """The offers of this test: earlier ones may have left some in the process."""
    own = [offer for offer in same_host._offers if offer.tag in (TAG, TAG + 1)]
    return [offer for offer in own if offer.group is (group or world())]


# Nobody waits ---------------------------------------------------------------------------------


def launched_and_dropped(launch: Launch) -> list[weakref.ref[torch.Tensor]]:
    """Launch two that are alike and drop both; return what was offered."""
    pending = [launch(start)[1] for start in (10.0, 20.0)]
    offered = [members for offer in held() for members in offer._tensors.values()]
    assert len(held()) == len(pending)
    return [weakref.ref(tensor) for members in offered for tensor in members]


def dropped(launch: Launch, first: int | None) -> tuple[list[bool], int, bool]:
    """Drop what `first` has dropped before the others launch it, and do more."""
    neighbours(world())
    dist.barrier()
    if first not in (None, dist.get_rank()):
        dist.barrier()
    offered = launched_and_dropped(launch)
    if first == dist.get_rank():
        dist.barrier()
    exact = complete(launch)
    return exact, len(held()), all(tensor() is None for tensor in offered)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("first", [None, 0, 1])
@pytest.mark.parametrize("launch", [gather, reduce])
def test_what_nobody_reads_is_freed(launch: Launch, first: int | None) -> None:
    assert run_ranks(dropped, 2, launch, first) == [([True] * 3, 0, True)] * 2


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("launch", [gather, reduce])
def test_what_none_of_three_ranks_reads_is_freed(launch: Launch) -> None:
    assert run_ranks(dropped, 3, launch, None) == [([True] * 3, 0, True)] * 3


def launched_by_one_alone() -> list[object]:
    """Tags of what is held while one rank has launched, and when the other has done so too."""
    other, rank = TAG + 1, dist.get_rank()
    seen: list[object] = []
    for late in (False, True):
        if late == bool(rank):
            gather(10.0, other)
        seen += [complete(gather), [offer.tag - TAG for offer in held()]]
    return seen


@pytest.mark.usefixtures("readable")
def test_an_offer_lives_until_the_others_have_offered_theirs() -> None:
    exact: list[object] = [True] * 3
    assert run_ranks(launched_by_one_alone, 2) == [
        [exact, [1], exact, []],
        [exact, [], exact, []],
    ]


# Waits that are interrupted -------------------------------------------------------------------


@contextlib.contextmanager
def interrupted_at(call: int) -> Iterator[None]:
    """Interrupt this rank instead of a read from a neighbour."""
    calls_left = call

    def read(*place: int) -> None:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0:
            raise KeyboardInterrupt
        READ(*place)

    with mock.patch.object(same_host, "read", read), pytest.raises(KeyboardInterrupt):
        yield


def interrupted(launch: Launch, ranks: tuple[int, ...]) -> list[tuple[list[bool], int]]:
    """Interrupt some ranks at each of the reads of a collective; go on with more."""
    seen = []
    for call in range(4):  # the addresses of two ranks, and what is there
        _, pending = launch(10.0)
        with interrupted_at(call) if dist.get_rank() in ranks else contextlib.nullcontext():
            pending.wait()
        del pending
        seen.append((complete(launch), len(held())))
    return seen


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,)])
@pytest.mark.parametrize("launch", [gather, reduce])
def test_the_next_one_does_not_read_what_was_for_nobody(
    launch: Launch, ranks: tuple[int, ...]
) -> None:
    assert run_ranks(interrupted, 3, launch, ranks) == [[([True] * 3, 0)] * 4] * 3


def one_keeps_its_exception() -> list[object]:
    kept: list[BaseException] = []
    pending = gather(10.0)[1]
    with interrupted_at(1):
        try:
            pending.wait()
        except KeyboardInterrupt as error:
            kept.append(error)
            raise
    del pending
    if dist.get_rank() == 0:
        kept.clear()
        gc.collect()
    seen: list[object] = [complete(gather), len(held())]
    kept.clear()
    gc.collect()
    return [*seen, complete(gather), len(held())]


@pytest.mark.usefixtures("readable")
def test_a_rank_does_not_wait_for_one_that_keeps_its_exception() -> None:
    exact = [True] * 3
    assert run_ranks(one_keeps_its_exception, 2) == [[exact, 1, exact, 0]] * 2


def interrupted_when_it_has_told_one() -> tuple[list[int], list[bool], int]:
    """Count how often each of the others is told that this rank has read."""
    told: Counter[int] = Counter()

    def write(process: int, *place: int) -> None:
        WRITE(process, *place)
        is_flag = place[-1] == 1  # and no letter
        told[process] += is_flag
        if is_flag and told.total() == 1:
            raise KeyboardInterrupt

    with mock.patch.object(same_host, "write", write):
        pending = gather(10.0)[1]
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        del pending
        exact = complete(gather)
    return list(told.values()), exact, len(held())


@pytest.mark.usefixtures("readable")
def test_nobody_is_told_twice() -> None:
    assert run_ranks(interrupted_when_it_has_told_one, 3) == [([4, 4], [True] * 3, 0)] * 3


# More of what happens meanwhile ----------------------------------------------------------------


def dies_with_the_lock_held() -> tuple[bool, list[bool], int]:
    pending = gather(10.0)[1]
    own = held()
    with neighbours(world())[1 - dist.get_rank()].box._lock:
        del pending
    noted = own == list(same_host._abandoned)[-1:]
    own.clear()
    return noted, complete(gather), len(held())


@pytest.mark.usefixtures("readable")
def test_a_reader_may_die_while_a_letter_is_taken() -> None:
    assert run_ranks(dies_with_the_lock_held, 2) == [(True, [True] * 3, 0)] * 2


def dies_without_globals() -> tuple[list[str], list[bool], int]:
    pending, found = gather(10.0)[1], []
    with (
        mock.patch.object(sys, "unraisablehook", lambda one: found.append(str(one.exc_value))),
        mock.patch.object(same_host, "_abandoned", None),
    ):
        del pending
    return found, complete(gather), len(held())


@pytest.mark.usefixtures("readable")
def test_a_reader_may_die_when_the_interpreter_ends() -> None:
    assert run_ranks(dies_without_globals, 2) == [([], [True] * 3, 0)] * 2


class Shared(list[Offer]):
    """A list to which another thread may just have added something."""

    def __setitem__(self, *_: Any) -> None:
        raise AssertionError


def with_shared_list() -> tuple[list[bool], int]:
    shared = Shared()
    with mock.patch.object(same_host, "_offers", shared):
        exact = complete(gather)
        assert same_host._offers is shared
        return exact, len(shared)


def interrupted_while_letting_go() -> int:
    """Drop a gather on rank 0 and interrupt what tells rank 1; return what is held at last."""
    _, pending = gather(0.0)
    if dist.get_rank() == 1:
        pending.wait()
    del pending
    dist.barrier()
    if dist.get_rank() == 0:
        interrupt = mock.Mock(side_effect=KeyboardInterrupt)
        with mock.patch.object(same_host, "read", interrupt), pytest.raises(KeyboardInterrupt):
            same_host.settle({})
    same_host.settle({TAG: "testing"})
    return len(held())


@pytest.mark.usefixtures("readable")
def test_after_an_interrupt_neighbours_are_told_the_next_time() -> None:
    assert run_ranks(interrupted_while_letting_go, 2) == [0, 0]


@pytest.mark.usefixtures("readable")
def test_the_list_of_offers_is_never_replaced() -> None:
    assert run_ranks(with_shared_list, 2) == [([True] * 3, 0)] * 2


# Failures --------------------------------------------------------------------------------------


def lost_meanwhile() -> tuple[list[bool], int, bool]:
    group, peer = dist.new_group(), 1 - dist.get_rank()
    assert isinstance(group, dist.ProcessGroup)
    offer = Offer(group, TAG, {peer: [torch.ones(2)]})
    failures.lost(group, peer, "a test")
    offer.abandon()
    exact = complete(gather)
    kept, noted = held(group), offer in same_host._abandoned
    same_host._offers.remove(offer)
    return exact, len(kept), noted


@pytest.mark.usefixtures("readable")
def test_what_was_offered_to_a_lost_group_is_kept() -> None:
    assert run_ranks(lost_meanwhile, 2) == [([True] * 3, 1, False)] * 2


def ended_meanwhile(is_known: bool) -> tuple[list[bool], int, int, bool, bool]:
    """Abandon an offer to a process that has ended, or is just ending; do something else."""
    group, peer = dist.new_group(), 1 - dist.get_rank()
    assert isinstance(group, dist.ProcessGroup)
    reads = []

    def read(process: int, *place: int) -> None:
        reads.append(process)
        READ(process, *place)

    with subprocess.Popen(["true"]) as ended, contextlib.ExitStack() as patches:
        ended_neighbour = Neighbour(peer, ended.pid, LetterBox(), 0)
        neighbours(group)[peer] = ended_neighbour
        while not ended_neighbour.ends_within(60):  # a zombie until the block is left
            time.sleep(0)
        with mock.patch.object(Neighbour, "write", lambda *_: True):
            offer = Offer(group, TAG, {peer: [torch.ones(2)]})
        offer._letters[peer].content = 8, 4
        offer.abandon()
        patches.enter_context(mock.patch.object(same_host, "read", read))
        if not is_known:
            patches.enter_context(mock.patch.object(Neighbour, "ends_within", lambda *_: False))
        exact = complete(gather)
        kept, noted = held(group), offer in same_host._abandoned
        same_host._offers.remove(offer)
        return exact, len(kept), reads.count(ended.pid), noted, failures.is_lost(group)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("is_known", [True, False])
def test_the_end_of_a_process_is_no_failure_of_another_group(is_known: bool) -> None:
    wanted = ([True] * 3, 1, int(not is_known), False, False)
    assert run_ranks(ended_meanwhile, 2, is_known) == [wanted] * 2
