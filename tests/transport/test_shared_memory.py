"""Memory that ranks of one host share: who does, what becomes of it, who cannot harm it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from near import sharing

from composable_shard.core.transport import mailbox, shared_memory
from composable_shard.core.transport.exchange import Exchange
from composable_shard.core.transport.mailbox import mailbox_of, near_ranks, why_apart
from composable_shard.core.transport.pending import Pending
from composable_shard.core.transport.point_to_point import DirectAllGather
from composable_shard.core.transport.shared_memory import SWITCH, OwnFile, PeerFile, Shared
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks

__all__ = ["sharing"]

TAG = 977
PAGE = mmap.PAGESIZE
HUGE = 2 << 20


def fresh_group(**options: object) -> dist.ProcessGroup:
    """All ranks, in a group that has tried nothing yet."""
    group = dist.new_group(**options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def gathers(group: dist.ProcessGroup) -> bool:
    """Gather; tell whether the shards of all have come."""
    count = group.size()
    output, own = torch.empty(3 * count), torch.full((3,), float(group.rank()))
    Pending(DirectAllGather().launch([output], [own], group, TAG)).wait()
    return torch.equal(output, torch.arange(float(count)).repeat_interleave(3))


# Who shares -----------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps what is logged."""

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
    return near_ranks(groups[0]), why_apart(groups[0]), texts[: len(texts) // 2], said, exact


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
            f"rank {rank} and rank {peer} exchange messages, because {why}" for peer in apart
        ]


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "not here")


FAILURES = {
    "memory": (os, "memfd_create", "a rank has no memory to share: [Errno 1] not here"),
    "end": (os, "pidfd_open", "a rank has no memory to share: [Errno 1] not here"),
    "socket": (
        *(socket.socket, "connect"),
        "no Unix socket leads from one to the other: [Errno 1] not here",
    ),
    "visit": (
        *(socket, "recv_fds"),
        "a rank cannot take the memory of another: [Errno 1] not here",
    ),
    "map": (
        *(shared_memory, "PeerFile"),
        "a rank cannot take the memory of another: [Errno 1] not here",
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
            "what they send goes through sockets, which is slower"
        ]


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


def forbidden() -> str:
    """What a rank finds that runs where processes may not look into each other.

    Not dumpable: the system treats it as one of another user. And a filter: of the calls that read
    or write the memory of other processes, or take their descriptors, each is refused.
    """
    return Path(__file__).with_name("forbidden.py").as_posix()


@pytest.mark.usefixtures("sharing")
def test_processes_that_may_not_look_into_each_other_share_all_the_same(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, forbidden(), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in told] == ["refused: EPERM EPERM EPERM; shares; exact\n"] * 2, told


# The door -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sharing")
def test_a_visitor_who_does_not_know_the_secret_is_sent_away() -> None:
    host, guest = (shared_memory._Door(rank, 2, 8) for rank in range(2))
    stranger_file, its_end = os.pipe()
    with shared_memory._new_socket() as stranger:
        stranger.connect(shared_memory._name_of(host.card))
        socket.send_fds(stranger, [b"x" * 32], [stranger_file, its_end])
    guest.own.words[3] = 41
    assert guest.pass_to(host.card, 1) is None
    shared = Shared(host.own, on_this_host=[1])
    host.take_in(shared, 8)
    assert (shared.reasons, shared.files[1].words[3]) == ({}, 41)
    for door in (host, guest):
        door.close()
    for file in (stranger_file, its_end):
        os.close(file)


@pytest.mark.usefixtures("sharing")
def test_a_visitor_who_brings_too_little_is_sent_away() -> None:
    host, guest = (shared_memory._Door(rank, 2, 8) for rank in range(2))
    with shared_memory._new_socket() as visit:
        visit.connect(shared_memory._name_of(host.card))
        visit.send(shared_memory._secret_of(host.card, 1))
    assert guest.pass_to(host.card, 1) is None
    shared = Shared(host.own, on_this_host=[1])
    host.take_in(shared, 8)
    assert list(shared.files) == [1]
    for door in (host, guest):
        door.close()


# Files and slabs ------------------------------------------------------------------------------


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


def test_a_slab_is_read_where_it_was_written() -> None:
    own = OwnFile(8)
    peer = PeerFile(os.dup(own.file), 8)
    own.words[7] = -5
    assert peer.words[7] == -5
    slabs = [own.take(nbytes) for nbytes in (PAGE, 3 * PAGE + 1)]
    for number, slab in enumerate(slabs):
        ctypes.memset(slab.address + 64, number + 1, 5)
    for number, slab in enumerate(slabs):
        seen = torch.zeros(7, dtype=torch.uint8)
        peer.read(slab.start + 64, seen.data_ptr(), 7)
        assert seen.tolist() == [number + 1] * 5 + [0, 0]


def test_several_places_are_filled_by_one_call() -> None:
    own, into = OwnFile(8), torch.full((12,), -1, dtype=torch.int32)
    peer, slab = PeerFile(os.dup(own.file), 8), own.take(PAGE)
    written = torch.arange(100, dtype=torch.int32)
    ctypes.memmove(slab.address, written.data_ptr(), written.nbytes)
    first, second = into[:3].data_ptr(), into[5:].data_ptr()
    assert peer.read_pieces(slab.start + 8, [second, 16, first, 12, second, 0])
    assert into.tolist() == [6, 7, 8, -1, -1, 2, 3, 4, 5, -1, -1, -1]
    assert not peer.read_pieces(slab.start + PAGE - 16, [first, 12, second, 12])  # its end
    assert not peer.read_pieces(slab.start, [8, 4])
    each = [word for _ in range(1025) for word in (first, 4)]
    assert peer.read_pieces(slab.start, each[2:])
    assert not peer.read_pieces(slab.start, each)  # more than the system takes


def test_what_is_not_there_cannot_be_read() -> None:
    own, into = OwnFile(8), torch.zeros(PAGE, dtype=torch.uint8)
    peer = PeerFile(os.dup(own.file), 8)
    with pytest.raises(ShardError) as caught:
        peer.read(10, into.data_ptr(), PAGE)
    told = "Expected to read {} bytes of shared memory, got {} and {}"
    assert str(caught.value) == told.format(PAGE, PAGE - 10, "its end")
    with pytest.raises(ShardError) as caught:
        peer.read(0, 8, PAGE)
    assert str(caught.value) == told.format(PAGE, 0, "the error 'Bad address'")


def test_free_slabs_are_used_again_the_smallest_that_fits_first() -> None:
    own = OwnFile(8)
    small, large = own.take(PAGE), own.take(8 * PAGE)
    for slab in (large, small):
        own.give_back(slab)
    assert own.take(PAGE - 1) is small
    assert own.take(2 * PAGE) is large
    assert own.take(1) not in (small, large)


def blocks(own: OwnFile) -> int:
    return os.fstat(own.file).st_blocks * 512


def test_memory_that_was_not_used_for_long_goes_back_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "IDLE_USES", 5)
    own = OwnFile(8)
    own.give_back(own.take(64 * PAGE))
    with_it = blocks(own)
    held = [own.take(65 * PAGE)]
    assert blocks(own) == with_it + 65 * PAGE  # not yet: it may be wanted soon
    for _ in range(6):
        own.give_back(held.pop())
        held.append(own.take(65 * PAGE))
    own.take(66 * PAGE)
    assert blocks(own) == with_it + (65 + 66 - 64) * PAGE


def num_huge_bytes(address: int) -> int:
    """Return how much of the piece of a file that is mapped at an address lies in huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"{address:08x}-"))
    line = next(line for line in lines[first:] if line.startswith("ShmemPmdMapped:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("nbytes", [HUGE, 3 * HUGE + 5 * PAGE, 2 * HUGE - PAGE])
def test_big_slabs_have_huge_pages_as_far_as_they_go(nbytes: int) -> None:
    own = OwnFile(8)
    peer = PeerFile(os.dup(own.file), 8)
    before = blocks(own)
    own.take(PAGE)  # so that the next does not begin on a huge page by luck
    slab = own.take(nbytes)
    assert blocks(own) == before + PAGE + nbytes  # all of it is there, and no more
    assert slab.address % HUGE == slab.start % HUGE == 0
    if num_huge_bytes(slab.address) == 0:
        pytest.skip("this system makes no huge pages of shared memory")
    assert num_huge_bytes(slab.address) == nbytes // HUGE * HUGE
    for place in (0, HUGE - 1, nbytes - 1):
        ctypes.memset(slab.address + place, 7, 1)
        seen = torch.zeros(1, dtype=torch.uint8)
        peer.read(slab.start + place, seen.data_ptr(), 1)
        assert seen.item() == 7
    own.give_back(slab)
    assert own.return_free() == nbytes
    assert blocks(own) == before + PAGE


def test_a_system_that_makes_no_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = mock.Mock(wraps=shared_memory._libc())
    libc.madvise.side_effect = lambda *_: -1
    monkeypatch.setattr(shared_memory, "_libc", lambda: libc)
    own = OwnFile(8)
    before = blocks(own)
    slab = own.take(2 * HUGE + PAGE)
    assert libc.madvise.call_args.args == (slab.address, 2 * HUGE, 25)
    assert blocks(own) == before + 2 * HUGE + PAGE
    ctypes.memset(slab.address, 1, slab.nbytes)


def test_a_lack_of_memory_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*_: object) -> None:
        raise OSError(28, "No space left on device")

    own = OwnFile(8)
    monkeypatch.setattr(os, "posix_fallocate", lack)
    with pytest.raises(ShardError) as caught:
        own.take(5 * PAGE - 1)
    assert str(caught.value) == (
        f"Expected {5 * PAGE} bytes of memory to share with the other ranks of this host, got the "
        f"error 'No space left on device'; {SWITCH}=0 on all ranks sends everything through sockets"
    )


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def descriptors_after_groups() -> tuple[int, int]:
    """Count them when ten groups have come and gone, and when ten more have."""
    counts = []
    for _ in range(2):
        for _ in range(10):
            group = fresh_group()
            assert gathers(group) and mailbox_of(group) is not None
            dist.destroy_process_group(group)
            del group
        counts.append(num_descriptors())
    return counts[0], counts[1]


@pytest.mark.usefixtures("sharing")
def test_nothing_is_left_of_groups_that_were_destroyed() -> None:
    for first, second in run_ranks(descriptors_after_groups, 2):
        assert abs(second - first) <= 3  # of torch's own, which come and go late


def tries_in_a_child(act: Callable[[], object]) -> str:
    """Do something in a forked process; return what it says."""
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
    with os.fdopen(here) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def forked() -> tuple[str, str, bool]:
    group = fresh_group()
    assert gathers(group)
    output, own = torch.empty(4), torch.full((2,), 9.0)
    with mock.patch.object(Exchange, "is_there", lambda _: False):  # or the last one reads at once
        pending = Pending(DirectAllGather().launch([output], [own], group, TAG))
    launched = tries_in_a_child(lambda: gathers(group))
    waited = tries_in_a_child(lambda: pending.wait())
    pending.wait()
    return launched, waited, gathers(group) and output.tolist() == [9.0] * 4


@pytest.mark.usefixtures("sharing")
def test_a_forked_process_publishes_nothing() -> None:
    refused = (
        "Expected the process that made a process group to use it, got one that was forked from "
        "it; start the ranks before, or make a process group in each"
    )
    for launched, waited, exact in run_ranks(forked, 2):
        assert (refused in launched, refused in waited, exact) == (True, True, True)


def in_threads() -> bool:
    """Gather in two threads at once, each with tags of its own."""
    group, exact = fresh_group(), list[bool]()
    near_ranks(group)

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
    return exact == [True] * 150


@pytest.mark.usefixtures("sharing")
def test_threads_gather_beside_each_other() -> None:
    assert run_ranks(in_threads, 2) == [True, True]
