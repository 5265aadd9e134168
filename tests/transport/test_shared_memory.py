"""Ranks of one host read each other's memory where they may, and send where they may not."""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults.breaking import ALL_RANKS, AWAY
from near import Apart, readable
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.core.transport import point_to_point, same_host
from composable_shard.core.transport.pending import Pending
from composable_shard.core.transport.point_to_point import DirectAllGather, DirectReduceScatter
from composable_shard.core.transport.same_host import (
    NUM_LETTERS,
    LetterBox,
    Neighbour,
    Offer,
    neighbours,
)
from composable_shard.core.tree_reductions import Reductions
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks

__all__ = ["readable"]

WIDTH = 8
READ = same_host.read
TAG = 977


def fresh_group(**options: object) -> dist.ProcessGroup:
    """All ranks, in a group that has tried nothing yet."""
    group = dist.new_group(**options)
    assert isinstance(group, dist.ProcessGroup)
    return group


# Who is near ----------------------------------------------------------------------------------


def near_and_processes() -> tuple[dict[int, int], list[int]]:
    heard: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(heard, os.getpid())
    return {rank: one.process for rank, one in neighbours(fresh_group()).items()}, heard


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_one_host_are_neighbours(ranks: int) -> None:
    for rank, (near, heard) in enumerate(run_ranks(near_and_processes, ranks)):
        assert near == {peer: heard[peer] for peer in range(ranks) if peer != rank}


def near_with_a_false_number() -> list[int]:
    number = os.getppid() if dist.get_rank() == 1 else os.getpid()
    with mock.patch.object(os, "getpid", lambda: number):
        return sorted(neighbours(fresh_group()))


@pytest.mark.usefixtures("readable")
def test_a_process_that_does_not_know_the_secret_is_no_neighbour() -> None:
    assert run_ranks(near_with_a_false_number, 3) == [[2], [], [0]]


def near_without_leave() -> list[int]:
    setting = {same_host.SWITCH: "0" if dist.get_rank() == 1 else "1"}
    with mock.patch.dict(os.environ, setting):
        return sorted(neighbours(fresh_group()))


@pytest.mark.usefixtures("readable")
def test_a_rank_that_is_told_not_to_read_is_not_read_either() -> None:
    assert run_ranks(near_without_leave, 3) == [[2], [], [0]]


def test_memory_that_is_not_there() -> None:
    if not same_host.is_offered():
        pytest.skip("the system does not let a process read another one")
    with pytest.raises(ShardError) as caught:
        same_host.read(os.getpid(), 8, torch.empty(3).data_ptr(), 12)
    assert str(caught.value) == (
        f"Expected to copy 12 bytes by process_vm_readv with process {os.getpid()}, got 0 and the "
        "error 'Bad address'; has that rank ended? COMPOSABLE_SHARD_READ_NEAR_MEMORY=0 on all "
        "ranks sends everything through sockets"
    )


def test_long_tensors_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not same_host.is_offered():
        pytest.skip("the system does not let a process read another one")
    monkeypatch.setattr(same_host, "LONGEST_COPY", 7)
    source, read = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    same_host.read(os.getpid(), source.data_ptr(), read.data_ptr(), read.nbytes)
    assert torch.equal(read, source)
    flipped = source.flip(0).contiguous()
    same_host.write(os.getpid(), read.data_ptr(), flipped.data_ptr(), read.nbytes)
    assert torch.equal(read, flipped)


# Letters --------------------------------------------------------------------------------------


def letters_to_itself() -> tuple[Neighbour, LetterBox]:
    box = LetterBox()
    return Neighbour(0, os.getpid(), box, box.address), box


def test_letters_arrive_by_tag_in_the_order_they_were_written() -> None:
    if not same_host.is_offered():
        pytest.skip("the system does not let a process read another one")
    neighbour, box = letters_to_itself()
    first, second, other = (box.expect(tag) for tag in (1, 1, 2))
    assert box.look(second) is None
    for tag, address in [(1, 10), (2, 20), (1, 11)]:
        assert neighbour.write(tag, address, 100 + address)
    assert [box.look(letter) for letter in (other, second, first)] == [
        *((20, 120), (11, 111), (10, 110))
    ]
    assert box.look(box.expect(1)) is None


def test_letters_may_come_before_they_are_expected() -> None:
    if not same_host.is_offered():
        pytest.skip("the system does not let a process read another one")
    neighbour, box = letters_to_itself()
    for tag, address in [(1, 10), (2, 20), (1, 11), (3, 30)]:
        assert neighbour.write(tag, address, 100 + address)
    assert box.look(box.expect(3)) == (30, 130)
    first, other, second = (box.expect(tag) for tag in (1, 2, 1))
    assert box.look(second) == (11, 111)
    assert (first.content, other.content) == ((10, 110), (20, 120))


def test_a_box_keeps_nothing_of_tags_that_are_over() -> None:
    if not same_host.is_offered():
        pytest.skip("the system does not let a process read another one")
    neighbour, box = letters_to_itself()
    for tag in range(10):
        early = neighbour.write(tag, 7, 8)
        letters = box.expect(tag), box.expect(tag)
        assert early and neighbour.write(tag, 9, 8)
        assert [box.look(letter) for letter in letters] == [(7, 8), (9, 8)]
    assert (box._expected, box._early) == ({}, {})


def test_a_full_box_takes_no_letter_until_one_is_taken_out() -> None:
    if not same_host.is_offered():
        pytest.skip("the system does not let a process read another one")
    neighbour, box = letters_to_itself()
    for lap in range(3):
        for number in range(NUM_LETTERS):
            assert neighbour.write(5, lap, number)
        assert not neighbour.write(5, lap, -1)
        assert [box.look(box.expect(5)) for _ in range(NUM_LETTERS)] == [
            (lap, number) for number in range(NUM_LETTERS)
        ]


def ends_before_it_offers() -> str:
    group, rank = fresh_group(), dist.get_rank()
    with subprocess.Popen(["true"]) as ended:  # a zombie until the block is left
        time.sleep(0.2)
        neighbours(group)[1 - rank] = Neighbour(1 - rank, ended.pid, LetterBox(), 0)
        with mock.patch.object(Neighbour, "write", lambda *_: True):
            offer = Offer(group, TAG, {1 - rank: []})
        with pytest.raises(ShardError) as caught:
            offer.places(1 - rank)
        same_host._offers.remove(offer)
        return str(caught.value).replace(str(ended.pid), "P")


@pytest.mark.usefixtures("readable")
def test_a_neighbour_that_has_ended_is_named_at_once() -> None:
    assert run_ranks(ends_before_it_offers, 2) == [
        f"Expected rank {peer} to take part in a collective, got the end of its process P"
        for peer in (1, 0)
    ]


# The collectives ------------------------------------------------------------------------------

NUMELS = (1, 5, 70, 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64]


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + numel)
    return (torch.randn(numel, generator=generator) * 9).to(dtype)


def kept_apart(fn: Callable[..., bool], apart: int | None) -> Callable[..., bool]:
    """Let ranks read all others (`None`), none (0), or those that are not so many ranks away."""
    return fn if apart is None else Apart(fn, apart or None)


def gathered(dtype: torch.dtype) -> bool:
    rank, count = dist.get_rank(), dist.get_world_size()
    inputs = [numbers(rank, numel, dtype) for numel in NUMELS]
    outputs = [torch.empty(count * numel, dtype=dtype) for numel in NUMELS]
    group = dist.group.WORLD
    assert group is not None
    Pending(DirectAllGather().launch(outputs, inputs, group, TAG)).wait()
    same_host.settle({TAG: "testing"})
    wanted = [torch.cat([numbers(peer, numel, dtype) for peer in range(count)]) for numel in NUMELS]
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(outputs, wanted, strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("apart", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_are_the_shards_of_all(dtype: torch.dtype, apart: int | None, ranks: int) -> None:
    assert run_ranks(kept_apart(gathered, apart), ranks, dtype) == [True] * ranks


def reduced(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype, op: str) -> bool:
    """Reduce in `dtype` what is of the first of `dtypes` on rank 0, of the next on rank 1, ..."""
    rank, count = dist.get_rank(), dist.get_world_size()
    full = [
        [
            numbers(peer, count * numel, dtypes[peer % len(dtypes)]).view(count, numel)
            for peer in range(count)
        ]
        for numel in NUMELS
    ]
    inputs = [parts[rank].flatten().clone() for parts in full]
    outputs = [torch.empty(numel, dtype=dtype) for numel in NUMELS]
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(point_to_point, "CHUNK_NUMEL", 16):
        reduction = getattr(dist.ReduceOp, op)
        Pending(DirectReduceScatter().launch(outputs, inputs, group, reduction, TAG)).wait()
    same_host.settle({TAG: "testing"})
    same = []
    for out, parts in zip(outputs, full, strict=True):
        total = parts[0][rank].to(torch.promote_types(dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part[rank]
        same.append(torch.equal(out, (total / count if op == "AVG" else total).to(dtype)))
    return all(same)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("apart", [None, 0, 1, 2])
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    [
        ((torch.float32,), torch.float32),
        ((torch.bfloat16,), torch.bfloat16),
        ((torch.float16,), torch.float16),
        ((torch.float64,), torch.float64),
        ((torch.bfloat16,), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    ],
    ids=str,
)
def test_reduced_is_the_sum_in_rank_order(
    dtypes: tuple[torch.dtype, ...], dtype: torch.dtype, op: str, apart: int | None, ranks: int
) -> None:
    case = kept_apart(reduced, apart), ranks, dtypes, dtype, op
    assert run_ranks(*case) == [True] * ranks


# When memory may be changed and freed ----------------------------------------------------------


def slowly(process: int, there: int, here: int, nbytes: int) -> None:
    if dist.get_rank() == 1:
        time.sleep(0.1)
    READ(process, there, here, nbytes)


def changed_at_once(act: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `act` returns, when a quick rank overwrites its shards as soon as `act` is over."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model)
    with mock.patch.object(same_host, "read", slowly):
        seen = act(model, torch.ones(1, WIDTH))
        model.reshard()
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(100)  # type: ignore[attr-defined]
        dist.barrier()
    return seen


def evaluates(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def runs_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).detach()  # type: ignore[no-any-return]


def unshards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.unshard()  # type: ignore[operator]
    weight: torch.Tensor = model.weight  # type: ignore[assignment]
    return weight.detach().sum(1)[None].clone()


def trains(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    model.set_reshard_after_forward(True)  # type: ignore[operator]
    model(x).sum().backward()
    assert x.grad is not None
    return x.grad


def trains_without_sync(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with model.no_sync():  # type: ignore[operator]
        return trains(model, x)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("act", [evaluates, runs_forward, unshards, trains, trains_without_sync])
def test_nothing_is_read_when_a_pass_has_ended(
    act: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    for seen in run_ranks(changed_at_once, 2, act):
        assert torch.equal(seen, torch.full((1, WIDTH), float(WIDTH)))


def cast_and_reused() -> tuple[torch.Tensor, int]:
    """Gather by a slow rank, while a quick one allocates what it has just let go of."""
    model = nn.Linear(256, 256, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with mock.patch.object(same_host, "read", slowly), torch.no_grad():
        handle = model.unshard(async_op=True)  # type: ignore[operator]
        with mock.patch.object(Reductions, "wait_until_read", lambda _: None):
            handle.wait()
        garbage = [torch.full((128 * 256,), 7, dtype=torch.bfloat16) for _ in range(50)]
        dist.barrier()
    weight: torch.Tensor = model.weight  # type: ignore[assignment]
    return weight.detach().float(), len(garbage)


@pytest.mark.usefixtures("readable")
def test_a_cast_lives_until_it_was_read() -> None:
    for weight, _ in run_ranks(cast_and_reused, 2):
        assert torch.equal(weight, torch.ones(256, 256))


def dropped_at_once() -> tuple[bool, list[bool]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    offered = torch.full((1 << 16,), float(rank))
    offer = Offer(group, TAG, {1 - rank: [offered]})
    known = len(same_host._offers)
    seen = torch.empty(1 << 16)
    if rank == 0:
        del offer, offered
        garbage = [torch.full((1 << 16,), 7.0) for _ in range(50)]
        dist.barrier()
        dist.barrier()
        flagged = [one.was_read for one in same_host._offers[known - 1 :]]
        del same_host._offers[known - 1 :]  # which this rank never reads
        return len(garbage) == 50, flagged
    dist.barrier()
    offer.read(0, offer.places(0)[0].address, seen)
    offer.finish()
    dist.barrier()
    same_host._offers.remove(offer)
    return torch.equal(seen, torch.zeros(1 << 16)), []


@pytest.mark.usefixtures("readable")
def test_an_offer_outlives_its_model() -> None:
    assert run_ranks(dropped_at_once, 2) == [(True, [True]), (True, [])]


def memory_after_training() -> list[int]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    held = []
    for _ in range(3):
        model(torch.ones(1, WIDTH)).sum().backward()
        held.append(sum(offer.group is dist.group.WORLD for offer in same_host._offers))
    return held


@pytest.mark.usefixtures("readable")
def test_nothing_is_held_after_a_backward() -> None:
    for held in run_ranks(memory_after_training, 2):
        assert held == [held[0]] * 3


def nobody_reads() -> str:
    group = fresh_group(timeout=datetime.timedelta(seconds=2))
    peer = 1 - dist.get_rank()
    offer = Offer(group, TAG, {peer: [torch.ones(3)]})
    offer.places(peer)
    with mock.patch.object(same_host, "write", lambda *_: None):
        offer.finish()
    same_host.settle({TAG + 1: "testing"})  # somebody else's: nothing to wait for
    with pytest.raises(ShardError) as caught:
        same_host.settle({TAG: "testing"})
    same_host._offers.remove(offer)
    return str(caught.value)


@pytest.mark.usefixtures("readable")
def test_a_rank_that_does_not_read_is_missed_within_the_time_out() -> None:
    for rank, said in enumerate(run_ranks(nobody_reads, 2)):
        peer = 1 - rank
        missed = (
            f"Rank {rank} failed while others were testing: Expected rank {peer} to take part in a "
            "collective, got no sign of it within the time-out of 2 s"
        )
        # Both give up at once: whether the other one still waited is a matter of moments.
        waits = f"; rank {peer} waits while others were testing. " + ALL_RANKS
        assert said in (missed, missed + waits, missed + AWAY.format(peer))
