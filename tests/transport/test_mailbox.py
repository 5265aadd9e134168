"""What ranks of one host publish for each other: the collectives, and what interrupts them."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from near import Apart
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.core.transport import background
from composable_shard.core.transport.gloo import mailbox, point_to_point
from composable_shard.core.transport.gloo.exchange import Exchange
from composable_shard.core.transport.gloo.mailbox import Mailbox, mailbox_of
from composable_shard.core.transport.gloo.point_to_point import DirectAllGather, DirectReduceScatter
from composable_shard.core.transport.pending import Pending
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks

TAG = 1 << 30  # which no model of another test has
WIDTH = 8
Launch = Callable[[float], tuple[torch.Tensor, Pending]]

pytestmark = pytest.mark.usefixtures("sharing")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def box(group: dist.ProcessGroup | None = None) -> Mailbox:
    found = mailbox_of(group or world())
    assert found is not None
    return found


NUMELS = (1, 5, 70, 0)
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + numel)
    return (torch.randn(numel, generator=generator) * 9).abs().to(dtype)


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
    wanted = [torch.cat([numbers(peer, numel, dtype) for peer in range(count)]) for numel in NUMELS]
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(outputs, wanted, strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("apart", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_are_the_shards_of_all(dtype: torch.dtype, apart: int | None, ranks: int) -> None:
    assert run_ranks(kept_apart(gathered, apart), ranks, dtype) == [True] * ranks


def reduced(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype, op: str) -> bool:
    """Reduce tensors in `dtype`, which have the dtype number r of `dtypes` on rank r."""
    rank, count = dist.get_rank(), dist.get_world_size()
    full = [
        [
            numbers(peer, count * numel, dtypes[peer % len(dtypes)]).view(count, numel)
            for peer in range(count)
        ]
        for numel in NUMELS
    ]
    reduction, same = getattr(dist.ReduceOp, op), []
    inputs = [parts[rank].flatten().clone() for parts in full]
    outputs = [torch.empty(numel, dtype=dtype) for numel in NUMELS]
    with mock.patch.object(point_to_point, "CHUNK_NUMEL", 16):
        launched = DirectReduceScatter().launch(outputs, inputs, world(), reduction, TAG, dtype)
        Pending(launched).wait()
    for out, parts in zip(outputs, full, strict=True):
        total = parts[0][rank].to(torch.promote_types(dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part[rank]
        same.append(torch.equal(out, (total / count if op == "AVG" else total).to(dtype)))
    return all(same)


@pytest.mark.parametrize("ranks", [2, 3, 4])
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


@contextlib.contextmanager
def slow_reader() -> Iterator[None]:
    """Let rank 1 read late, when others have gone on."""
    find = Exchange._find

    def late(self: Exchange, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return find(self, *args, **kwargs)

    with mock.patch.object(Exchange, "_find", late):
        yield


def changed_at_once(
    act: Callable[[nn.Module, torch.Tensor], torch.Tensor], policy: MixedPrecisionPolicy
) -> torch.Tensor:
    """What `act` returns, when a quick rank overwrites its shards as soon as `act` is over."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mp_policy=policy)
    with slow_reader():
        seen = act(model, torch.ones(1, WIDTH))
        model.reshard()
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(100)  # type: ignore[attr-defined]
        garbage = [torch.full((WIDTH, WIDTH), 7.0) for _ in range(50)]
        dist.barrier()
    assert len(garbage) == 50
    return seen.float()


def evaluates(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def trains(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    model.set_reshard_after_forward(True)  # type: ignore[operator]
    model(x).sum().backward()
    assert x.grad is not None
    return x.grad


def trains_without_sync(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with model.no_sync():  # type: ignore[operator]
        return trains(model, x)


@pytest.mark.parametrize("policy", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", [evaluates, trains, trains_without_sync])
def test_shards_may_change_as_soon_as_a_pass_has_ended(
    act: Callable[[nn.Module, torch.Tensor], torch.Tensor], policy: torch.dtype | None
) -> None:
    for seen in run_ranks(changed_at_once, 2, act, MixedPrecisionPolicy(param_dtype=policy)):
        assert torch.equal(seen, torch.full((1, WIDTH), float(WIDTH)))


def gather(start: float, tag: int = TAG) -> tuple[torch.Tensor, Pending]:
    output = torch.empty(2 * dist.get_world_size())
    shard = torch.full((2,), start + dist.get_rank())
    pending = Pending(DirectAllGather().launch([output], [shard], world(), tag))
    shard.fill_(-1)
    return output, pending


def reduce(start: float) -> tuple[torch.Tensor, Pending]:
    output, op = torch.empty(2), dist.ReduceOp.SUM
    full = torch.full((2 * dist.get_world_size(),), start + dist.get_rank())
    pending = Pending(DirectReduceScatter().launch([output], [full], world(), op, TAG, full.dtype))
    full.fill_(-1)
    return output, pending


def is_exact(launch: Launch, start: float, output: torch.Tensor) -> bool:
    ranks = torch.arange(dist.get_world_size()) + start
    wanted = ranks.repeat_interleave(2) if launch is not reduce else ranks.sum().expand(2)
    return torch.equal(output, wanted)


def complete(launch: Launch) -> list[bool]:
    """Launch three, one after another, and wait; tell which are exact."""
    exact = []
    for start in (30.0, 40.0, 50.0):
        output, pending = launch(start)
        pending.wait()
        exact.append(is_exact(launch, start, output))
    return exact


def unread() -> int:
    """How much of what this rank has published is never read, when all have come here."""
    gc.collect()
    dist.barrier()
    box().process_given_up()
    dist.barrier()
    for peer in box().peers.values():
        box().read_entries(peer)
    dist.barrier()
    count = num_unread(box()) + sum(len(peer.to_acknowledge) for peer in box().peers.values())
    dist.barrier()  # the others count, too, before any goes on
    return count


def num_unread(mine: Mailbox) -> int:
    mine.process_given_up()
    mine._reclaim_slabs()
    return len(mine._published)


@on_ranks(2)
def test_nothing_is_held_after_a_backward_and_memory_does_not_grow() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    left, slabs = [], []
    for _ in range(20):
        model(torch.ones(1, WIDTH)).sum().backward()
        left.append(unread())
        slabs.append(os.fstat(box()._own.file).st_blocks)
    assert left == [left[0]] * 20  # what tests before have left to nobody
    assert max(slabs[10:]) <= 3 * max(slabs[:10])  # more where ranks are further apart


def gathered_to_one(num: int, in_step: bool) -> tuple[list[bool], int]:
    """Gather to the first rank alone; return whether it is exact, and how much was unread."""
    group, rank = dist.new_group(), dist.get_rank()
    count, exact, most = group.size(), list[bool](), 0
    mine = box(group)
    for step in range(num):
        output, own = torch.empty(count * 3), torch.full((3,), float(step + rank))
        works = DirectAllGather().launch([output] if rank == 0 else [], [own], group, TAG, 0)
        Pending(works).wait()
        if in_step:
            dist.barrier()
            most = max(most, num_unread(mine))
        if rank == 0:
            wanted = torch.arange(count).repeat_interleave(3) + step
            exact.append(torch.equal(output, wanted.float()))
    dist.barrier()  # another collective: nobody looks into mailboxes meanwhile
    return exact, most


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_gets_nothing_still_reads_entries(ranks: int) -> None:
    for num, in_step in ((2 * mailbox.NUM_ENTRIES + 5, False), (20, True)):
        found = run_ranks(gathered_to_one, ranks, num, in_step)
        assert [exact for exact, _ in found] == [[True] * num, *[[]] * (ranks - 1)]
        assert max(most for _, most in found) <= 2


def one_is_late(num: int, sign: Path) -> tuple[list[bool], bool]:
    """Launch more than the ring has entries, before the other rank takes note of any.

    The file ``sign`` is there once the first rank waits for room.
    """
    poll_room = Mailbox.poll_room

    def told(self: Mailbox, ranks: list[int]) -> bool:
        if dist.get_rank() == 0:
            sign.touch()
        return poll_room(self, ranks)

    box()
    with mock.patch.object(background, "_periodic", []):  # where it would take note
        time.sleep(0.1)  # in which what has begun there ends
        dist.barrier()
        if dist.get_rank() == 1:
            end = time.monotonic() + 10
            while not sign.exists() and time.monotonic() < end:
                time.sleep(0.001)
    with mock.patch.object(Mailbox, "poll_room", told):
        launched = [(number, *gather(float(number))) for number in range(num)]
    exact = []
    for number, output, pending in launched:
        pending.wait()
        exact.append(is_exact(gather, number, output))
    return exact, sign.exists()


def test_a_rank_that_is_far_ahead_waits_until_others_have_taken_note(tmp_path: Path) -> None:
    num = mailbox.NUM_ENTRIES + 1
    found = run_ranks(one_is_late, 2, num, tmp_path / "waits")
    assert found == [([True] * num, True)] * 2


def dropped(launch: Launch, first: int | None) -> tuple[list[bool], int]:
    """Drop what `first` has dropped before the others launch it, and do more."""
    before = unread()
    if first not in (None, dist.get_rank()):
        dist.barrier()
    for start in (10.0, 20.0):
        launch(start)
    if first == dist.get_rank():
        dist.barrier()
    return complete(launch), unread() - before


@pytest.mark.parametrize("launch", [gather, reduce])
@pytest.mark.parametrize(("first", "ranks"), [(None, 2), (0, 2), (1, 2), (None, 3)])
def test_what_nobody_reads_is_freed(launch: Launch, first: int | None, ranks: int) -> None:
    assert run_ranks(dropped, ranks, launch, first) == [([True] * 3, 0)] * ranks


PLACES = [
    (Mailbox, "find_entry"),
    (Mailbox, "acknowledge"),
    (Mailbox, "_acknowledge_entry"),
    (Exchange, "_find"),
]


@contextlib.contextmanager
def interrupted_at(owner: type, name: str, call: int) -> Iterator[None]:
    """Interrupt this rank at one of its calls of a method, before or after it."""
    method, calls_left = getattr(owner, name), call

    def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        result = None
        if calls_left < 0 and call % 2:
            result = method(self, *args, **kwargs)
        if calls_left < 0:
            calls_left = 1 << 30
            raise KeyboardInterrupt
        return result or method(self, *args, **kwargs)

    with mock.patch.object(owner, name, instead):
        yield


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,)])
@pytest.mark.parametrize("launch", [gather, reduce])
@on_ranks(3)
def test_the_next_one_does_not_read_what_was_for_nobody(
    launch: Launch, ranks: tuple[int, ...]
) -> None:
    """Interrupt some ranks at each of the steps of a wait; go on in step with the others."""
    seen: list[object] = []
    for owner, name in PLACES:
        for call in range(4):
            _, pending = launch(10.0)
            with contextlib.ExitStack() as stack:
                if dist.get_rank() in ranks:
                    stack.enter_context(interrupted_at(owner, name, call))
                with contextlib.suppress(KeyboardInterrupt):
                    pending.wait()
            del pending
            seen.append((name, call, complete(launch)))
    assert [exact for *_, exact in seen] == [[True] * 3] * 16, seen


def interrupted_at_launch(name: str) -> list[str]:
    """Interrupt rank 0 before it has published, and go on: who waits for it is told."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)

    def launch() -> Pending:
        output = torch.empty(4)
        return Pending(DirectAllGather().launch([output], [torch.ones(2)], group, TAG))

    launch().wait()
    said = []
    if dist.get_rank() == 0:
        interrupt = mock.patch.object(Mailbox, name, mock.Mock(side_effect=KeyboardInterrupt))
        with interrupt, pytest.raises(KeyboardInterrupt):
            launch()
        launch()  # in step with what the other one does, and not waited for
    else:
        for _ in range(2):
            with pytest.raises(ShardError) as caught:
                launch().wait()
            said.append(str(caught.value))
    dist.barrier()
    return said


@pytest.mark.parametrize("name", ["allocate_slab", "publish"])
def test_a_rank_that_is_interrupted_before_it_publishes_is_missed_at_once(name: str) -> None:
    _, (missed, refused) = run_ranks(interrupted_at_launch, 2, name)
    expected = "Expected rank 0 to take part in a collective, got a notice that it has given up"
    assert missed.removeprefix("Rank 1 failed while communicating: ") == expected
    assert refused == (
        f"Expected a process group without failures, got one that had failed before: {expected}"
    )


@on_ranks(2)
def test_an_exchange_may_be_deleted_while_the_lock_is_held() -> None:
    before = unread()
    pending = gather(10.0)[1]
    with box()._lock:
        del pending
        noted = len(box().given_up)
    assert (noted, complete(gather), unread() - before) == ((1, [True] * 3, 0))
