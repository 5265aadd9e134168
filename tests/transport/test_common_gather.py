"""Ranks of one host that compute from the same unsharded parameters."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults.poisoned import Fault, planted
from near import Apart
from on_ranks import on_ranks
from torch import nn

from composable_shard import _torch, fully_shard
from composable_shard.core.transport.common_gather import CommonGather, have_common_memory
from composable_shard.core.transport.mailbox import Mailbox, mailbox_of
from composable_shard.core.transport.pending import Pending
from composable_shard.core.transport.point_to_point import DirectAllGather
from composable_shard.core.transport.shared_memory import CommonFile, Lease, OwnFile
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks

TAG = 1 << 29  # which no model of another test has
FILE = "/memfd:composable_shard"

pytestmark = pytest.mark.usefixtures("sharing")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def box() -> Mailbox:
    found = mailbox_of(world())
    assert found is not None and found.shared.common is not None
    return found


def fresh_group() -> dist.ProcessGroup:
    """Return a process group of all ranks that has shared nothing yet."""
    group = dist.new_group()
    assert group is not None
    return group


def empty(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without memory."""
    buffer = torch.empty(numel, dtype=dtype)
    assert _torch.free(buffer)
    return buffer


def own(start: float, numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return (torch.arange(numel) % 50 + start + 3 * rank).to(dtype)


def whole(start: float, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([own(start, numel, dtype, rank) for rank in range(dist.get_world_size())])


def begin(start: float, numel: int = 2000, tag: int = TAG) -> tuple[torch.Tensor, Pending]:
    """Launch a gather of one tensor; return where it is going to be."""
    buffer = empty(dist.get_world_size() * numel)
    inputs = [own(start, numel, torch.float32, dist.get_rank())]
    works = DirectAllGather().launch_into([buffer], [buffer], inputs, world(), tag)
    return buffer, Pending(works)


def place_of(address: int) -> tuple[str, int, str] | None:
    """Return the file, the place in it and the rights of what is mapped at an address, if it is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, offset, _, inode, *name = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            is_common = bool(name) and name[0].startswith(FILE)
            return (inode, int(offset, 16) + address - low, rights) if is_common else None
    return None


NUMELS = (1, 70, 3000)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def gathered(dtype: torch.dtype) -> list[bool]:
    """Gather parts of two buffers, one of which has memory, and what is part of none."""
    rank, count = dist.get_rank(), dist.get_world_size()
    ends = [count * numel for numel in NUMELS]
    flat, kept = torch.empty(sum(ends) + 5, dtype=dtype), torch.empty(sum(ends), dtype=dtype)
    outputs = [
        *flat[2 : 2 + sum(ends)].split(ends),
        *kept.split(ends),
        *(torch.empty(end, dtype=dtype) for end in ends),
    ]
    assert _torch.free(flat)
    inputs = [own(place, out.numel() // count, dtype, rank) for place, out in enumerate(outputs)]
    works = DirectAllGather().launch_into([flat, kept], outputs, inputs, world(), TAG)
    for one in inputs if rank == 0 else ():
        one.view(torch.uint8).fill_(0x55)  # the first one has written them at once
    Pending(works).wait()
    wanted = [whole(i, out.numel() // count, dtype) for i, out in enumerate(outputs)]
    return [
        *(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(outputs, wanted, strict=True)
        ),
        place_of(flat.data_ptr()) is not None,
        place_of(kept.data_ptr()) is None,
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_are_the_shards_of_all(dtype: torch.dtype, ranks: int) -> None:
    for same in run_ranks(gathered, ranks, dtype):
        assert same == [True] * len(same)


def late(rank: int, which: str) -> list[bool]:
    """Launch and wait with one rank behind; then launch several and wait for the last first."""
    exact = []
    for start in range(4):
        if which == "launching" and dist.get_rank() == rank:
            time.sleep(0.05)
        buffer, pending = begin(start)
        if which == "waiting" and dist.get_rank() == rank:
            time.sleep(0.05)
        pending.wait()
        exact.append(torch.equal(buffer, whole(start, 2000)))
    launched = [(start, *begin(start, tag=TAG + 2 * start)) for start in range(5)]
    for start, buffer, pending in reversed(launched):
        pending.wait()
        exact.append(torch.equal(buffer, whole(start, 2000)))
    return exact


@pytest.mark.parametrize("which", ["launching", "waiting"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_may_be_late(rank: int, which: str) -> None:
    assert run_ranks(late, 3, rank, which) == [[True] * 9] * 3


@on_ranks(3)
def test_a_rank_writes_while_it_waits_for_something_else() -> None:
    """Launch before the first rank does, and then wait for another collective of that rank."""
    if dist.get_rank() == 0:
        time.sleep(0.1)
    first, pending = begin(1, tag=TAG + 20)
    if dist.get_rank() == 0:
        pending.wait()  # for what the others have only launched
    other, after = begin(2, tag=TAG + 22)
    after.wait()
    pending.wait()
    assert ([torch.equal(first, whole(1, 2000)), torch.equal(other, whole(2, 2000))]) == (
        [True] * 2
    )


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_a_rank_writes_while_it_waits_outside() -> None:
    """Launch before the first rank does, and then wait for it in a collective of one's own."""
    rank = dist.get_rank()
    box()
    dist.barrier()
    if rank == 0:
        time.sleep(0.1)
    output, pending = begin(1)
    if rank == 0:
        pending.wait()  # for what the others have only launched
    dist.barrier()
    pending.wait()
    assert torch.equal(output, whole(1, 2000))


@on_ranks(2)
def test_one_thread_writes_what_two_could() -> None:
    """Let three threads write what this rank has launched, the slab of which is there by now."""
    mailbox, said, calls = box(), list[str](), list[int]()
    write = CommonGather._write

    def slow(self: CommonGather) -> None:
        calls.append(threading.get_ident())
        time.sleep(0.2)
        write(self)

    def run(act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 (the test says which)
            said.append(f"{type(error).__name__}: {error}")

    with mock.patch.object(CommonGather, "_write", slow):
        if dist.get_rank() == 0:
            dist.barrier()  # until the other has launched
        output, pending = begin(5)
        dist.barrier()
        if dist.get_rank() == 0:
            run(pending.wait)
        else:
            dist.barrier()  # until the first one has the slab
            acts = [mailbox.write_what_it_can, pending.wait, mailbox.write_what_it_can]
            threads = [threading.Thread(target=run, args=(act,)) for act in acts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert (len(calls), said, torch.equal(output, whole(5, 2000))) == ((1, [], True))


def used_for_long(rank: int) -> list[bool]:
    """Gather many times while one rank still uses what it gathered first."""
    buffer, pending = begin(7)
    pending.wait()
    exact, kept = [], buffer if dist.get_rank() == rank else None
    del buffer
    for start in range(10, 20):
        other, pending = begin(start)
        pending.wait()
        exact.append(torch.equal(other, whole(start, 2000)))
        exact.append(kept is None or torch.equal(kept, whole(7, 2000)))
    return exact


@pytest.mark.parametrize("rank", [0, 2])
def test_a_slab_is_not_taken_while_a_rank_uses_it(rank: int) -> None:
    assert run_ranks(used_for_long, 3, rank) == [[True] * 20] * 3


def used_for_long_with_a_fault() -> list[bool]:
    fault = Fault(Mailbox, "_take_back", " and not published.slab.is_held", "")
    with planted(fault):
        return used_for_long(0)


def test_a_slab_that_is_taken_while_the_first_rank_uses_it_would_be_seen() -> None:
    first, *_ = run_ranks(used_for_long_with_a_fault, 3)
    assert not all(first)


def blocks_and_maps() -> tuple[list[int], list[int]]:
    """Gather tensors of several sizes; return what that takes, of the file and of addresses."""
    slabs, blocks, maps = box().shared.slabs, [], []
    for start in range(60):
        buffer, pending = begin(start, (1000, 40_000, 700_000)[start % 3])
        pending.wait()
        del buffer, pending
        if start % 3 == 2:
            blocks.append(os.fstat(slabs.file).st_blocks if slabs is not None else 0)
            maps.append(Path("/proc/self/maps").read_text().count(FILE))
    return blocks, maps


def test_memory_does_not_grow() -> None:
    for blocks, maps in run_ranks(blocks_and_maps, 2):
        assert max(blocks[10:]) <= 2 * max(blocks[:10])
        assert max(maps) <= 120  # two views of sixteen slabs, in pieces, and those of others


@on_ranks(2)
def test_ranks_that_gather_other_things_are_told() -> None:
    group, numel = fresh_group(), 300 + dist.get_rank()
    buffer = empty(2 * numel)
    with pytest.raises(ShardError) as caught:
        Pending(
            DirectAllGather().launch_into([buffer], [buffer], [torch.ones(numel)], group, TAG)
        ).wait()
    rank = dist.get_rank()
    said = f"{type(caught.value).__name__}: {caught.value}"
    assert f" bytes in all from rank {1 - rank} as on this one, got others" in said, said


def not_mapped() -> tuple[str, bool]:
    """Go on after the first rank had a slab, and could not map it; the slab is there again."""
    group, said = fresh_group(), ""

    def refuse(*_: object) -> None:
        raise ShardError("no more mappings")

    def gathered() -> torch.Tensor:
        buffer = empty(1200)
        shard = torch.full((600,), float(dist.get_rank()))
        Pending(DirectAllGather().launch_into([buffer], [buffer], [shard], group, TAG)).wait()
        return buffer

    gathered()
    gc.collect()
    mailbox = mailbox_of(group)
    assert mailbox is not None
    mailbox.let_go()
    dist.barrier()
    slabs = mailbox.shared.slabs
    before = 0 if slabs is None else os.fstat(slabs.file).st_size
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(mock.patch.object(CommonFile, "lease", refuse))
        try:
            gathered()
        except ShardError as error:
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    is_exact = gathered().tolist() == [0.0] * 600 + [1.0] * 600
    return said, is_exact and (slabs is None or os.fstat(slabs.file).st_size == before)


def test_a_slab_that_the_first_rank_cannot_map_is_no_memory_on_all() -> None:
    first, second = run_ranks(not_mapped, 2)
    assert first == ("ShardError: no more mappings", True)
    told = "Expected rank 0 to have 4800 bytes of memory to share with the other ranks of this host"
    assert second == (f"CommunicationError: {told}, got none", True)


class Interrupted(BaseException):
    """Comes from outside, as that of a keyboard does."""


def interrupted(rank: int, method: str) -> list[str]:
    """Interrupt a rank in the middle; the others hear of it at once, and a new group works."""
    group, said = fresh_group(), []

    def interrupt(*_: object) -> None:
        raise Interrupted

    with contextlib.ExitStack() as stack:
        if dist.get_rank() == rank:
            stack.enter_context(mock.patch.object(CommonGather, method, interrupt))
        start = time.monotonic()
        try:
            buffer = empty(600)
            Pending(
                DirectAllGather().launch_into([buffer], [buffer], [torch.ones(200)], group, TAG)
            ).wait()
        except (Interrupted, ShardError) as error:
            said.append(type(error).__name__)
            del error
        gc.collect()
    if dist.get_rank() == rank:  # tells what it has given up before the next one
        with contextlib.suppress(ShardError):
            mailbox = mailbox_of(group)
            assert mailbox is not None
            mailbox.go_on()
    dist.barrier()
    said.append("soon" if time.monotonic() - start < 20 else "late")
    other, pending = begin(3)
    pending.wait()
    said.append(str(torch.equal(other, whole(3, 2000))))
    return said


def test_a_rank_that_is_interrupted_before_it_has_written_is_missed_at_once() -> None:
    first, second, third = run_ranks(interrupted, 3, 1, "_write")
    assert second == ["Interrupted", "soon", "True"]
    for kind, *rest in (first, third):  # at the wait, or at the launch
        assert kind in ("CommunicationError", "ShardError") and rest == ["soon", "True"]


def interrupted_while_it_writes(place: str) -> tuple[str, bool]:
    """Interrupt a rank between what it does when it writes; then let it wait as if nothing were."""
    owner, name = {
        "before it says so": (CommonGather, "_publish"),
        "before it begins": (Mailbox, "write_no_more"),
        "before its buffers have the slab": (_torch, "adopt"),
    }[place]
    said, real = "", getattr(owner, name)

    def interrupt(*args: Any) -> Any:
        if seen:
            return real(*args)
        seen.append(1)
        raise Interrupted

    seen: list[int] = []
    if dist.get_rank() == 0:
        output, pending = begin(9, numel=600)
        dist.barrier()
    else:
        with mock.patch.object(Mailbox, "catch_up", lambda _: None):  # of the thread beside
            with mock.patch.object(Mailbox, "look", lambda *_: None):  # there is no slab yet
                output, pending = begin(9, numel=600)
            dist.barrier()
            with mock.patch.object(owner, name, interrupt):
                try:
                    box().write_what_it_can()
                except Interrupted:
                    said = "Interrupted"
    pending.wait()
    return said, torch.equal(output, whole(9, 600))


@pytest.mark.parametrize(
    "place", ["before it begins", "before its buffers have the slab", "before it says so"]
)
def test_a_rank_that_is_interrupted_while_it_writes_goes_on(place: str) -> None:
    assert run_ranks(interrupted_while_it_writes, 2, place) == [("", True), ("Interrupted", True)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lease_ends_whole_even_if_it_is_interrupted() -> None:
    """Python drops the interrupt; the slab is free, and what was written in private is gone."""
    own, ended, left = OwnFile(8), list[int](), [1]
    slab, common = own.take(mmap.PAGESIZE), CommonFile(os.dup(own.file))
    lease = common.lease(slab.start, slab.nbytes, lambda: ended.append(1))
    forget = lease._forget_own

    def interrupt() -> None:
        if left:
            left.pop()
            raise KeyboardInterrupt
        forget()

    ctypes.memset(lease.common, 3, slab.nbytes)
    ctypes.memset(lease.address, 9, slab.nbytes)
    lease._forget_own = interrupt
    del lease
    again = common.lease(slab.start, slab.nbytes, lambda: None)
    assert ended == [1]
    assert ctypes.string_at(again.address, slab.nbytes) == b"\3" * slab.nbytes


def where_memory_is_locked() -> list[bool] | str:
    """Map private views of a file while all new memory is locked; see what is written later."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = OwnFile(8)
    slab, common = own.take(4 * mmap.PAGESIZE), CommonFile(os.dup(own.file))
    if libc.mlockall(2):  # MCL_FUTURE
        return os.strerror(ctypes.get_errno())
    try:
        lease = common.lease(slab.start, slab.nbytes, lambda: None)
        seen = []
        for value in (3, 4):
            ctypes.memset(lease.common, value, slab.nbytes)
            seen.append(
                ctypes.string_at(lease.address, slab.nbytes) == bytes([value]) * slab.nbytes
            )
            ctypes.memset(lease.address, 9, slab.nbytes)
            del lease  # the next lease has the same mapping
            lease = common.lease(slab.start, slab.nbytes, lambda: None)
        del lease
        return seen
    finally:
        libc.munlockall()


def test_gathers_where_memory_is_locked() -> None:
    (found,) = run_ranks(where_memory_is_locked, 1)
    if isinstance(found, str):
        pytest.skip(f"this process may not lock its memory: {found}")
    assert found == [True, True]


WIDTH = 128


class Net(nn.Module):
    """Blocks of big and small parameters, watched from inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5 * WIDTH), nn.GELU(),
                          nn.Linear(5 * WIDTH, WIDTH))
            for _ in range(4)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def build() -> tuple[Any, Net]:
    torch.manual_seed(0)
    whole_net = Net()
    torch.manual_seed(0)
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), whole_net


def differences(num_steps: int, watch: Callable[[Any, int], None] | None = None) -> list[str]:
    """Train beside the unsharded model; return the parameters and losses that differ."""
    rank, count = dist.get_rank(), dist.get_world_size()
    model, oracle = build()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, oracle)]
    wrong = []
    for step in range(num_steps):
        if watch is not None:
            watch(model, step)
        batches = [
            torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + one))
            for one in range(count)
        ]
        loss = model(batches[rank]).square().mean()
        loss.backward()
        losses = [oracle(batch).square().mean() for batch in batches]
        (sum(losses) / count).backward()
        if not torch.allclose(loss, losses[rank], rtol=1e-5):
            wrong.append(f"loss {step}")
        for (name, param), other in zip(model.named_parameters(), oracle.parameters(), strict=True):
            if not torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6):
                wrong.append(f"{name} {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wrong


def places() -> tuple[list[str], list[tuple[str, int, str] | None]]:
    """Train; return where the first big weight of each block lies in the third step."""
    seen: list[tuple[str, int, str] | None] = []

    def watch(model: Any, step: int) -> None:
        for block in model.blocks if step == 2 else ():
            weight: Callable[[nn.Module, object], None] = lambda linear, _: seen.append(  # noqa: E731
                place_of(linear.weight.data_ptr())
            )
            block[1].register_forward_pre_hook(weight)

    return differences(4, watch), seen[:4]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_compute_from_the_same_memory(ranks: int) -> None:
    said = run_ranks(places, ranks)
    assert [wrong for wrong, _ in said] == [[]] * ranks
    first = said[0][1]
    assert len(first) == 4 and None not in first
    assert all(seen == first for _, seen in said)  # the same file, the same place
    assert {place[2] for place in first if place is not None} == {"rw-p"}


def writes_by_itself() -> tuple[list[str], list[float]]:
    """Let rank 0 write a weight in forward, unseen by autograd; the others look at it."""
    seen: list[float] = []

    def look(linear: Any, _: object) -> None:
        address = linear.weight.data_ptr()
        before = linear.weight.detach().clone()
        assert place_of(address) is not None
        dist.barrier()
        if dist.get_rank() == 0:
            ctypes.memset(address, 0x7F, linear.weight.nbytes)
        dist.barrier()
        seen.append((linear.weight.detach() - before).abs().max().item())
        if dist.get_rank() == 0:
            linear.weight.data.copy_(before)

    def watch(model: Any, step: int) -> None:
        if step == 2:
            model.blocks[1][1].register_forward_pre_hook(look)

    return differences(6, watch), seen


def test_what_a_rank_writes_stays_its_own_and_goes() -> None:
    first, second = run_ranks(writes_by_itself, 2)
    assert first[0] == second[0] == []
    assert min(first[1]) > 1e30 and second[1] == [0.0] * len(first[1])


@on_ranks(2)
def test_what_users_may_have_in_their_hands_is_a_ranks_own() -> None:
    """Tell whether what `unshard()` shows, stays after forward, or is kept is a rank's own."""
    model, _ = build()
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    block, other, third = model.blocks[:3]
    block.unshard()
    weight = block[1].weight
    own_memory = [place_of(weight.data_ptr()) is None]
    array = weight.detach().numpy()
    before = array.copy()
    other.set_reshard_after_forward(False)
    third.set_keep_unsharded_storage(True)
    model(x)
    own_memory.append(place_of(other[1].weight.data_ptr()) is None)
    address = other[1].weight.data_ptr()
    own_memory += [(array == before).all(), address == other[1].weight.data_ptr()]
    seen = []
    third[1].register_forward_pre_hook(lambda linear, _: seen.append(linear.weight.data_ptr()))
    for _ in range(3):
        model(x).sum().backward()
    assert ([*own_memory, len(set(seen)) == 1, place_of(seen[0]) is None]) == ([True] * 6)


def without(on_rank: int) -> tuple[bool, list[str]]:
    """Train where one rank's torch gives storages no memory that is there."""
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == on_rank:
            stack.enter_context(mock.patch.object(_torch, "can_adopt_memory", lambda: False))
        group = fresh_group()
        return have_common_memory(group), differences(2)


def test_where_the_first_rank_cannot_all_gather_copies() -> None:
    assert run_ranks(without, 2, 0) == [(False, [])] * 2


def test_ranks_that_are_apart_gather_copies() -> None:
    said = run_ranks(Apart(places), 2)
    assert said == [([], [None] * 4)] * 2


FAULTS = {
    "own shards are not written": Fault(
        CommonGather, "_write", "ctypes.memmove(", "(lambda *_: None)("
    ),
    "nobody waits until all have written": Fault(
        CommonGather, "wait", "for rank in self._unread:", "for rank in ():"
    ),
    "small parameters are not copied out": Fault(
        CommonGather, "_copy_out", "number < 0 or ", ""
    ),
    "what a rank wrote by itself stays": Fault(Lease, "__del__", "self._forget_own()", "pass"),
}  # fmt: skip


def seen_with(name: str) -> list[str]:
    write = CommonGather._write

    def late_writer(self: CommonGather) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.01)
        write(self)

    fault = FAULTS[name]
    late = mock.patch.object(CommonGather, "_write", late_writer)
    with planted(fault), late if fault.method == "wait" else contextlib.nullcontext():
        try:
            return differences(3)
        except RuntimeError as error:
            return [str(error)]
        finally:  # what the fault left in slabs is for no later test
            gc.collect()
            common = box().shared.common
            assert common is not None
            common._pieces._mapped.clear()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    assert any(run_ranks(seen_with, 2, name))
