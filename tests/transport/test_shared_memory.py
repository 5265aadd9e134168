"""Memory that ranks of one host share: who does, what becomes of it, who cannot harm it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import mmap
import os
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from composable_shard import _torch
from composable_shard.core.transport.gloo import mailbox, shared_memory
from composable_shard.core.transport.gloo.mailbox import local_ranks, mailbox_of, why_not_shared
from composable_shard.core.transport.gloo.point_to_point import DirectAllGather
from composable_shard.core.transport.gloo.shared_memory import SWITCH, OwnFile, PeerFile, Shared
from composable_shard.core.transport.pending import Pending
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks

TAG = 977
PAGE = mmap.PAGESIZE
HUGE = 2 << 20


def fresh_group(**options: object) -> dist.ProcessGroup:
    """All ranks, in a group that has tried nothing yet."""
    group = dist.new_group(**options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def gathers(group: dist.ProcessGroup) -> bool:
    count = group.size()
    output, own = torch.empty(3 * count), torch.full((3,), float(group.rank()))
    Pending(DirectAllGather().launch([output], [own], group, TAG)).wait()
    return torch.equal(output, torch.arange(float(count)).repeat_interleave(3))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def met() -> tuple[list[int], dict[int, str], list[str], list[str], bool]:
    """Whom a new group shares with, why not with others, what is logged and warned, and whether it
    gathers right all the same."""
    lines, log = Lines(), logging.getLogger("composable_shard")
    before = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    mailbox._is_warned = False
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            groups = [fresh_group() for _ in range(2)]
            exact = all([gathers(group) for group in groups])
    finally:
        log.removeHandler(lines)
        log.setLevel(before)
    texts = [text.partition(": ")[2] for text in lines.texts]
    said = [str(one.message) for one in warned if "share no memory" in str(one.message)]
    return local_ranks(groups[0]), why_not_shared(groups[0]), texts[: len(texts) // 2], said, exact


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_one_host_share_memory_and_the_log_says_so(ranks: int) -> None:
    for rank, (near, reasons, logged, warned, exact) in enumerate(run_ranks(met, ranks)):
        others = [peer for peer in range(ranks) if peer != rank]
        assert (near, reasons, warned, exact) == (others, {}, [], True)
        named = ", ".join(map(str, others))
        assert logged == [f"rank {rank} shares memory with rank {named}"]


def met_by_another_host() -> object:
    host = shared_memory._host()
    with mock.patch.object(shared_memory, "_host", lambda: host + (dist.get_rank() == 2)):
        return met()


@pytest.mark.usefixtures("sharing")
def test_ranks_of_different_hosts_exchange_messages_without_a_warning() -> None:
    why = "they run on different hosts"
    for rank, (near, reasons, logged, warned, exact) in enumerate(
        run_ranks(met_by_another_host, 3)
    ):
        assert near == [[1], [0], []][rank]
        apart = [[2], [2], [0, 1]][rank]
        assert (reasons, warned, exact) == (dict.fromkeys(apart, why), [], True)
        assert logged[-len(apart) :] == [
            f"rank {rank} and rank {peer} use sockets, because {why}" for peer in apart
        ]


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "not here")


FAILURES = {
    "memory": (os, "memfd_create", "a rank cannot set up shared memory: [Errno 1] not here"),
    "end": (os, "pidfd_open", "a rank cannot open or map the file of another: [Errno 1] not here"),
    "map": (
        *(shared_memory, "PeerFile"),
        "a rank cannot open or map the file of another: [Errno 1] not here",
    ),
}


def met_by_one_that_cannot(what: str) -> object:
    owner, name, _ = FAILURES[what]
    if dist.get_rank() == 1:
        with mock.patch.object(owner, name, refuse):
            return met()
    return met()


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("what", list(FAILURES))
def test_a_rank_that_cannot_share_is_sent_messages(what: str) -> None:
    """Both of a pair say why, and there is one warning, however many groups there are."""
    why = FAILURES[what][2]
    for rank, (near, reasons, _, warned, exact) in enumerate(
        run_ranks(met_by_one_that_cannot, 3, what)
    ):
        apart = [[1], [0, 2], [1]][rank]
        assert (near, reasons, exact) == ([[2], [], [0]][rank], dict.fromkeys(apart, why), True)
        assert warned == [
            f"Rank {rank} and rank {apart[0]} run on one host and share no memory, because {why}; "
            "they send messages through sockets, which is slower"
        ]


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more files, and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 50, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def met_with_few_descriptors(rank: int, count: int) -> tuple[list[int], dict[int, str], bool, bool]:
    """Whom a group shares with, why not with others, whether it takes seconds, and gathers."""
    group, start = fresh_group(), time.monotonic()
    dist.barrier()
    with descriptors_left(count) if dist.get_rank() == rank else contextlib.nullcontext():
        near = local_ranks(group)
    is_slow = time.monotonic() - start > 10.0
    return near, why_not_shared(group), is_slow, gathers(group)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_descriptors_is_sent_messages(rank: int, count: int) -> None:
    """However many are left, both of a pair know that they do not share, and why."""
    found = run_ranks(met_with_few_descriptors, 3, rank, count)
    for place, (near, reasons, is_slow, exact) in enumerate(found):
        assert (is_slow, exact) == (False, True)
        assert sorted([*near, *reasons]) == [peer for peer in range(3) if peer != place]
        for peer, reason in reasons.items():
            assert rank in (place, peer) and place in found[peer][1]
            assert "[Errno 24] Too many open files" in reason


def met_with_warnings_as_errors() -> tuple[str, bool]:
    group, raised = fresh_group(), ""
    mailbox._is_warned = False
    with warnings.catch_warnings(), mock.patch.object(os, "memfd_create", refuse):
        if dist.get_rank() == 1:
            warnings.simplefilter("error")
        try:
            local_ranks(group)
        except UserWarning as error:
            raised = str(error)
    return raised, gathers(group)


@pytest.mark.usefixtures("sharing")
def test_a_warning_that_is_an_error_on_one_rank_is_no_concern_of_others() -> None:
    told, raised = run_ranks(met_with_warnings_as_errors, 2)
    assert (told, raised[1]) == (("", True), True)
    assert raised[0].startswith("Rank 1 and rank 0 run on one host and share no memory, because")


@pytest.mark.usefixtures("sharing")
@on_ranks(2)
def test_a_program_that_a_rank_starts_inherits_no_memory_of_ranks() -> None:
    def inherited() -> set[int]:
        found = set[int]()
        for file in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the list itself
                if os.get_inheritable(file):
                    found.add(file)
        return found

    group = fresh_group()
    dist.barrier(group)
    before = inherited()
    assert gathers(group) and local_ranks(group)
    assert (sorted(inherited() - before)) == ([])


def met_by_one_that_is_told_not_to() -> object:
    with mock.patch.dict(os.environ, {SWITCH: "0"} if dist.get_rank() == 1 else {}):
        return met()


@pytest.mark.usefixtures("sharing")
def test_a_rank_that_is_told_not_to_share_is_left_alone() -> None:
    found = run_ranks(met_by_one_that_is_told_not_to, 2)
    why = f"{SWITCH}=0 is set"
    assert [one[:2] for one in found] == [([], {1: why}), ([], {0: why})]
    assert [bool(one[3]) for one in found] == [True, False]  # who was told knows it
    assert all(one[4] for one in found)


def test_a_rank_opens_no_file_but_that_of_the_other_rank() -> None:
    own, other, shared = OwnFile(8), OwnFile(8), Shared(None)
    own.words[3] = 41
    place, num_files = (os.getpid(), own.file, os.fstat(own.file).st_ino), num_descriptors()
    shared_memory._open(shared, 1, place, 8)
    assert (list(shared.files), shared.files[1].words[3]) == ([1], 41)
    with pytest.raises(OSError, match=f"process id {os.getpid()} belongs to another process here"):
        shared_memory._open(shared, 2, (os.getpid(), other.file, place[2]), 8)
    assert list(shared.files) == [1]
    shared.files.clear()
    assert num_descriptors() == num_files


def test_nobody_but_its_owner_can_write_a_file_and_nobody_can_shorten_it() -> None:
    own = OwnFile(8)
    with pytest.raises(PermissionError):
        os.ftruncate(own.file, PAGE // 2)
    passed = os.open(f"/proc/self/fd/{own.file}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        mmap.mmap(passed, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(passed, b"x", 0)
    with pytest.raises(PermissionError):  # and the seals stay as they are
        fcntl.fcntl(own.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    os.close(passed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int16])
def test_a_view_has_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    own = OwnFile(8)
    slab, written = own.allocate(PAGE), torch.arange(5).to(dtype)
    ctypes.memmove(slab.address + 16, written.data_ptr(), written.nbytes)
    view = PeerFile(os.dup(own.file), 8).view(slab.start, slab.nbytes)
    assert torch.equal(view.tensor(16, 5, dtype), written)
    assert torch.equal(view.tensor(16, 0, dtype), written[:0])
    assert view.bytes(18)[16:] == bytes(written.view(torch.uint8)[:2].tolist())
    assert len(view.bytes(2 * PAGE)) == PAGE  # its end


def resident_pages(address: int) -> int:
    (line, *_) = lines_of_mapping(address, "Rss:")
    return int(line.split()[1]) * 1024 // PAGE


def lines_of_mapping(address: int, name: str) -> list[str]:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"{address:08x}-"))
    return [line for line in lines[first:] if line.startswith(name)]


def test_what_was_looked_at_is_no_memory_of_this_process_in_the_end() -> None:
    own = OwnFile(8)
    slab = own.allocate(8 * PAGE)
    peer, seen = PeerFile(os.dup(own.file), 8), []
    for value in (1, 2):
        ctypes.memset(slab.address, value, slab.nbytes)
        view = peer.view(slab.start, slab.nbytes)
        every = view.tensor(0, slab.nbytes, torch.uint8)
        assert every.unique().tolist() == [value]
        seen.append(every.data_ptr())
        assert resident_pages(seen[-1]) == 8
        view.forget_pages()
        assert resident_pages(seen[-1]) == 0
        assert every[:PAGE].unique().tolist() == [value]  # who still looks, sees it
    assert seen[0] == seen[1]  # it stayed mapped


def test_what_has_ended_forgets_no_pages_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector ends the mapping first, and somebody else has its addresses at once."""
    real, others = shared_memory._libc(), list[int]()
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | shared_memory._MAP_FIXED

    def munmap(address: int, nbytes: int) -> int:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        _torch.map_memory(address, nbytes, both, anonymous, -1, 0)
        others.append(address)
        ctypes.memset(address, 7, nbytes)
        return 0

    libc = mock.Mock(wraps=real)
    libc.munmap.side_effect = munmap
    own = OwnFile(8)
    slab = own.allocate(PAGE)
    monkeypatch.setattr(shared_memory, "_libc", lambda: libc)
    view = PeerFile(os.dup(own.file), 8).view(slab.start, PAGE)
    expected = view.tensor(0, 1, torch.uint8).data_ptr()
    vars(view)["user"] = view  # in a circle, which the collector alone ends
    del view
    gc.collect()
    assert expected in others
    for address in others:
        assert ctypes.string_at(address, PAGE) == bytes([7]) * PAGE
        real.munmap(address, PAGE)


def test_as_many_slabs_stay_mapped_as_are_used_in_turns() -> None:
    own = OwnFile(8)
    slabs, peer = [own.allocate(PAGE) for _ in range(17)], PeerFile(os.dup(own.file), 8)
    for number, slab in enumerate(slabs):
        ctypes.memset(slab.address, number, 1)
    views = [peer.view(slab.start, slab.nbytes) for slab in slabs]  # in use, one more than stays
    for number, (slab, view) in enumerate(zip(slabs, views, strict=True)):
        assert view.tensor(0, 1, torch.uint8).item() == number
        address = view.tensor(0, 1, torch.uint8).data_ptr()
        again = peer.view(slab.start, slab.nbytes).tensor(0, 1, torch.uint8)
        assert again.item() == number
        assert number == 0 or again.data_ptr() != address  # each pushes out the next


def test_what_cannot_be_mapped_is_an_error() -> None:
    own = OwnFile(8)
    with pytest.raises(ShardError) as caught:
        PeerFile(os.dup(own.file), 8).view(1, PAGE)
    assert str(caught.value) == (
        f"Expected {PAGE} bytes of memory to share with the other ranks of this host, got the "
        f"error 'Invalid argument'; {SWITCH}=0 on all ranks sends everything through sockets"
    )


def blocks(own: OwnFile) -> int:
    return os.fstat(own.file).st_blocks * 512


def test_memory_that_was_not_used_for_long_goes_back_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "IDLE_USES", 5)
    own = OwnFile(8)
    own.free(own.allocate(64 * PAGE))
    with_it = blocks(own)
    held = [own.allocate(65 * PAGE)]
    assert blocks(own) == with_it + 65 * PAGE  # not yet: it may be wanted soon
    for _ in range(6):
        own.free(held.pop())
        held.append(own.allocate(65 * PAGE))
    own.allocate(66 * PAGE)
    assert blocks(own) == with_it + (65 + 66 - 64) * PAGE


def num_huge_bytes(address: int) -> int:
    (line, *_) = lines_of_mapping(address, "ShmemPmdMapped:")
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("nbytes", [HUGE, 3 * HUGE + 5 * PAGE, 2 * HUGE - PAGE])
def test_big_slabs_have_huge_pages_as_far_as_they_go(nbytes: int) -> None:
    own = OwnFile(8)
    peer = PeerFile(os.dup(own.file), 8)
    before = blocks(own)
    own.allocate(PAGE)  # so that the next does not begin on a huge page by luck
    slab = own.allocate(nbytes)
    assert blocks(own) == before + PAGE + nbytes  # all of it is there, and no more
    assert slab.address % HUGE == slab.start % HUGE == 0
    if num_huge_bytes(slab.address) == 0:
        pytest.skip("this system makes no huge pages of shared memory")
    assert num_huge_bytes(slab.address) == nbytes // HUGE * HUGE
    for place in (0, HUGE - 1, nbytes - 1):
        ctypes.memset(slab.address + place, 7, 1)
        assert peer.view(slab.start, nbytes).tensor(place, 1, torch.uint8).item() == 7
    own.free(slab)
    own._return(slab)
    assert blocks(own) == before + PAGE


def test_a_lack_of_memory_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*_: object) -> None:
        raise OSError(28, "No space left on device")

    own = OwnFile(8)
    monkeypatch.setattr(os, "posix_fallocate", lack)
    with pytest.raises(ShardError) as caught:
        own.allocate(5 * PAGE - 1)
    assert str(caught.value) == (
        f"Expected {5 * PAGE} bytes of memory to share with the other ranks of this host, got the "
        f"error 'No space left on device'; {SWITCH}=0 on all ranks sends everything through sockets"
    )


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("sharing")
@on_ranks(2)
def test_nothing_is_left_of_groups_that_were_destroyed() -> None:
    """Count them when ten groups have come and gone, and when ten more have."""
    counts = []
    for _ in range(2):
        for _ in range(10):
            group = fresh_group()
            assert gathers(group) and mailbox_of(group) is not None
            dist.destroy_process_group(group)
            del group
        counts.append(num_descriptors())
    first, second = counts[0], counts[1]
    assert abs(second - first) <= 3  # of torch's own, which come and go late


def child_that(act: Callable[[], object]) -> Callable[[], str]:
    """Fork a process that does something; return what waits for its end and what it says."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(act())
        except BaseException as error:  # noqa: BLE001 (the child must not go on)
            said = f"{type(error).__name__}: {error}"
        os.write(there, said.encode())
        os._exit(0)
    os.close(there)

    def answer() -> str:
        with os.fdopen(here) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return said

    return answer


def forked() -> tuple[str, str, bool]:
    group = fresh_group()
    assert gathers(group)
    output, own = torch.empty(4), torch.full((2,), 9.0)
    pending = Pending(DirectAllGather().launch([output], [own], group, TAG))
    launched = child_that(lambda: gathers(group))()
    waited = child_that(pending.wait)()
    pending.wait()
    return launched, waited, gathers(group) and output.tolist() == [9.0] * 4


REFUSED = (
    "Expected a process group in the process that made it, got it in a forked child; "
    "start the ranks first, and make a process group in each"
)


@pytest.mark.usefixtures("sharing")
def test_a_forked_process_publishes_nothing() -> None:
    for launched, waited, exact in run_ranks(forked, 2):
        assert (REFUSED in launched, REFUSED in waited, exact) == (True, True, True)


@pytest.mark.usefixtures("sharing")
@on_ranks(2)
def test_a_forked_process_does_not_write_to_memory_of_its_parent() -> None:
    group, rank = fresh_group(), dist.get_rank()
    local_ranks(group)

    def launch(value: float) -> tuple[torch.Tensor, Pending]:
        output, own = torch.empty(group.size()), torch.full((1,), value + rank)
        return output, Pending(DirectAllGather().launch([output], [own], group, TAG))

    launch(1.0)[1].wait()
    dist.barrier()  # what was read may be taken again, here and there
    begin, told = os.pipe()

    def later() -> object:
        os.read(begin, 1)
        return launch(50.0)

    answer = child_that(later)
    output, pending = launch(10.0)
    os.write(told, b"1")
    said = answer()
    dist.barrier()
    pending.wait()
    os.close(begin)
    os.close(told)
    assert (REFUSED in said, output.tolist()) == (True, [10.0, 11.0])


@pytest.mark.usefixtures("sharing")
@on_ranks(2)
def test_threads_gather_beside_each_other() -> None:
    group, exact = fresh_group(), list[bool]()
    local_ranks(group)

    def work(tag: int) -> None:
        for step in range(50):
            output, own = torch.empty(2), torch.full((1,), 100.0 * tag + step)
            Pending(DirectAllGather().launch([output], [own], group, tag)).wait()
            exact.append(output.tolist() == [100.0 * tag + step] * 2)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert exact == [True] * 150
