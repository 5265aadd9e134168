"""Shared memory between ranks of one host: each writes its own and reads that of the others.

For every process group, a rank has an anonymous file in memory (``memfd``). The other ranks of the
host open it read-only through ``/proc``, and watch its process by a pidfd. The system allows that
for processes of the same user; no rank can write the memory of another.

The file begins with the control words, which ``mailbox.py`` explains. After them come slabs, which
hold tensors until the other ranks have read them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import secrets
import select
import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.errors import ShardError

SWITCH = "COMPOSABLE_SHARD_SHARED_MEMORY"
IDLE_USES = 8
"""The memory of a free slab is returned to the system after more than this many allocations of
other slabs. Forward uses fewer slabs than backward, so unused slabs are returned during forward.
Memory use is highest when backward starts."""

_MAP_FIXED = 0x10  # of mmap(2)
_NUM_MAPPED = 16  # the most recently used pieces of a peer's file stay mapped
_DONTNEED, _COLLAPSE = mmap.MADV_DONTNEED, 25  # of madvise(2)
_HUGE_NBYTES = 2 * 1024 * 1024  # of a huge page on x86; where it is larger, slabs have small pages

# Files, and the slabs in them ---------------------------------------------------------------------


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.munmap.argtypes = [ctypes.c_void_p, word]
    libc.madvise.argtypes = [ctypes.c_void_p, word, number]
    return libc


class _Piece:
    """A piece of a file that stays mapped until nothing refers to its memory.

    Python's own ``mmap`` keeps a descriptor for every piece, and aligns only to small pages.

    Hazard: the garbage collector unmaps a piece before it calls ``__del__`` of an object that uses
    it, and the system reuses the addresses at once. Guard: :meth:`forget_pages` does nothing after
    the unmapping. Test: ``test_what_has_ended_forgets_no_pages_of_others``.

    Args:
        file: The descriptor of the file.
        start: The start of the piece in the file.
        nbytes: Its size, in whole pages.
        access: The access of ``mmap(2)``.
        alignment: The alignment of its address.

    Attributes:
        nbytes: Its size.
        address: Its address.
        memory: Its memory.
    """

    def __init__(
        self, file: int, start: int, nbytes: int, access: int, alignment: int = mmap.PAGESIZE
    ) -> None:
        reserved = nbytes + alignment - mmap.PAGESIZE
        begin = _map(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.nbytes = nbytes
        self.address = _round_up(begin, alignment)
        self.memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self._mapping = weakref.finalize(self.memory, _libc().munmap, begin, reserved)
        self._mapping.atexit = False
        _map(self.address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, file, start)
        self._advise, self._forget = _libc().madvise, _DONTNEED  # globals may be gone at exit

    def forget_pages(self) -> None:
        """Release its pages from the resident memory of this process, until it uses them again."""
        if self._mapping.alive:
            self._advise(self.address, self.nbytes, self._forget)


def _map(address: int | None, nbytes: int, access: int, flags: int, file: int, start: int) -> int:
    got = _torch.map_memory(address, nbytes, access, flags, file, start)
    if got is None:
        number = ctypes.get_errno()
        raise _no_memory(nbytes, OSError(number, os.strerror(number)))
    return got


def _no_memory(nbytes: int, error: OSError) -> ShardError:
    return ShardError(
        f"Expected {nbytes} bytes of memory to share with the other ranks of this host, got the "
        f"error '{error.strerror}'; {SWITCH}=0 on all ranks sends everything through sockets"
    )


def _round_up(nbytes: int, to: int = mmap.PAGESIZE) -> int:
    return -(-nbytes // to) * to


class View:
    """A slab, of this rank or of another one.

    Pages that were read count as resident memory of this process, too, until :meth:`forget_pages`.
    There is no ``__del__`` that calls it, since a ``KeyboardInterrupt`` in ``__del__`` would be
    lost.

    Attributes:
        address: Its address.
        file: The descriptor of the file.
        start: Its start in the file.
    """

    def __init__(self, piece: _Piece, file: int, start: int) -> None:
        self._memory, self.address = piece.memory, piece.address
        self.file, self.start = file, start
        self.forget_pages = piece.forget_pages

    def bytes(self, nbytes: int) -> bytes:
        """Return the first ``nbytes`` bytes, or all if there are fewer."""
        return bytes(memoryview(self._memory)[:nbytes])

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor [numel] that begins at ``start``; it must not be written."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)


class Slab(View):
    """A piece of this rank's file, for one message.

    Attributes:
        nbytes: Its size.
        last_use: The number of allocations from the file when this slab was last freed.
        is_held: Whether this rank still reads it itself.
    """

    def __init__(self, file: int, start: int, nbytes: int, alignment: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        super().__init__(_Piece(file, start, nbytes, access, alignment), file, start)
        self.nbytes = nbytes
        self.last_use = 0
        self.is_held = False


class OwnFile:
    """The file of this rank for one process group.

    Args:
        num_words: The number of control words at its beginning.

    Attributes:
        words: The control words, initially zero.

    Raises:
        OSError: If the file cannot be created.
        ShardError: If it cannot be mapped.
    """

    def __init__(self, num_words: int) -> None:
        self.file = os.memfd_create("composable_shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file).atexit = False
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._end = _round_up(num_words * 8)
        os.ftruncate(self.file, self._end)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self.words = memoryview(_Piece(self.file, 0, self._end, access).memory).cast("B").cast("q")
        self._free_slabs: list[Slab] = []
        self._num_uses = 0

    def allocate(self, nbytes: int) -> Slab:
        """Return the smallest free slab with at least ``nbytes`` bytes, or a new one.

        Raises:
            ShardError: If there is no memory left.
        """
        self._num_uses += 1
        fitting = [slab for slab in self._free_slabs if slab.nbytes >= nbytes]
        slab = min(fitting, key=lambda fit: (fit.nbytes, -fit.last_use), default=None)
        if slab is None:
            slab = self._new(_round_up(max(nbytes, 1)))
        else:
            self._free_slabs.remove(slab)
        self._return_idle()
        return slab

    def free(self, slab: Slab) -> None:
        """Free a slab that no rank reads any more."""
        _torch.poison(slab.address, slab.nbytes)
        slab.last_use = self._num_uses
        self._free_slabs.append(slab)

    def _new(self, nbytes: int) -> Slab:
        """Append a slab to the file, of huge pages where possible.

        Huge pages are read three times as fast and allocated in a quarter of the time. ``madvise``
        makes a huge page only of a range with at least one small page that is allocated already.
        """
        num_huge = nbytes // _HUGE_NBYTES
        alignment = _HUGE_NBYTES if num_huge else mmap.PAGESIZE
        start = _round_up(self._end, alignment)
        slab = Slab(self.file, start, nbytes, alignment)
        try:  # allocate now: without memory, a write would raise a signal instead of an error
            for number in range(num_huge):
                os.posix_fallocate(self.file, start + number * _HUGE_NBYTES, mmap.PAGESIZE)
            _libc().madvise(slab.address, num_huge * _HUGE_NBYTES, _COLLAPSE)
            os.posix_fallocate(self.file, start, nbytes)  # the rest in small pages
        except OSError as error:
            _libc().madvise(slab.address, nbytes, mmap.MADV_REMOVE)  # free what was allocated
            raise _no_memory(nbytes, error) from error
        self._end = start + nbytes
        return slab

    def _return_idle(self) -> None:
        """Return to the system the memory of slabs that have long been idle."""
        for slab in list(self._free_slabs):
            if self._num_uses - slab.last_use > IDLE_USES:
                self._return(slab)

    def _return(self, slab: Slab) -> None:
        self._free_slabs.remove(slab)
        _libc().madvise(slab.address, slab.nbytes, mmap.MADV_REMOVE)


class PeerFile:
    """The file of another rank, mapped read-only; the most recently used pieces stay mapped.

    Args:
        file: Its descriptor, which is closed with this object.
        num_words: The number of control words.

    Attributes:
        words: The control words.
        pidfd: The pidfd of its process.
    """

    pidfd: int

    def __init__(self, file: int, num_words: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False
        self._mapped: OrderedDict[tuple[int, int], _Piece] = OrderedDict()
        piece = _Piece(file, 0, _round_up(num_words * 8), mmap.PROT_READ)
        self.words = memoryview(piece.memory).cast("B").cast("q")

    def process_has_ended(self) -> bool:
        """Return whether its process has ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def view(self, start: int, nbytes: int) -> View:
        """View a slab.

        Args:
            start: Its start in the file.
            nbytes: Its size.

        Raises:
            ShardError: If it cannot be mapped.
        """
        key = start, nbytes
        piece = self._mapped.pop(key, None)
        if piece is None:
            alignment = _HUGE_NBYTES if nbytes >= _HUGE_NBYTES else mmap.PAGESIZE
            piece = _Piece(self._file, start, nbytes, mmap.PROT_READ, alignment)
        self._mapped[key] = piece
        while len(self._mapped) > _NUM_MAPPED:  # a view keeps its piece mapped
            self._mapped.popitem(last=False)
        return View(piece, self._file, start)


# Finding the ranks that can share memory, and passing files between them --------------------------


@dataclass
class Shared:
    """The memory that a rank shares with others of its process group.

    Attributes:
        own: The file of this rank; ``None`` if it can share with no rank.
        files: The files of other ranks, by rank.
        reasons: The reasons for not sharing memory with other ranks, by rank.
        on_this_host: The other ranks that run on this host.
    """

    own: OwnFile | None
    files: dict[int, PeerFile] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    on_this_host: list[int] = field(default_factory=list)


def share(group: dist.ProcessGroup, num_words: int) -> Shared:
    """Share memory with the ranks of ``group`` that run on this host, as far as possible.

    Args:
        group: A process group that sends tensors of the CPU.
        num_words: The number of control words at the beginning of each file.

    Collective: two all-gathers of small objects.

    Hazard: one rank fails, and others wait for it, or expect it to share. Guard: every failure is
    recorded as a reason, and ranks exchange their reasons, so both ranks of a pair know that they
    do not share. Test: ``test_a_rank_that_cannot_share_is_sent_messages``.
    """
    rank, host = group.rank(), _host()
    own, why_not = _new_file(num_words)
    place = None if own is None else (os.getpid(), own.file, os.fstat(own.file).st_ino)
    shared = Shared(own)
    for peer, (its_host, place_or_why) in enumerate(_all_gather((host, place or why_not), group)):
        if peer == rank:
            continue
        if its_host == host:
            shared.on_this_host.append(peer)
        if own is None or isinstance(place_or_why, str):
            shared.reasons[peer] = why_not or place_or_why
        elif its_host != host:
            shared.reasons[peer] = "they run on different hosts"
        else:
            try:
                _open(shared, peer, place_or_why, num_words)
            except (OSError, ShardError) as error:
                shared.reasons[peer] = f"a rank cannot open or map the file of another: {error}"
    _exchange_reasons(shared, group)
    return shared


def _all_gather(local: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, local, group=group)
    return gathered


def _exchange_reasons(shared: Shared, group: dist.ProcessGroup) -> None:
    """Exchange the reasons; adopt those of other ranks for not sharing with this rank."""
    rank = group.rank()
    for peer, reasons in enumerate(_all_gather(shared.reasons, group)):
        if rank in reasons:
            shared.reasons.setdefault(peer, reasons[rank])
    for peer in shared.reasons:
        shared.files.pop(peer, None)


def _host() -> int:
    """Return a number that identifies this host until it reboots."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        text = secrets.token_bytes(16)  # not Linux, or no descriptor left: share with no rank
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def _new_file(num_words: int) -> tuple[OwnFile | None, str]:
    """Return the file of this rank; ``None`` and the reason if it is not possible."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0 is set"
    needs = "memfd_create", "pidfd_open", "posix_fallocate"
    if not sys.platform.startswith("linux") or not all(hasattr(os, name) for name in needs):
        return None, "shared memory needs Linux"
    try:
        return OwnFile(num_words), ""
    except (OSError, ShardError) as error:
        return None, f"a rank cannot set up shared memory: {error}"


def _open(shared: Shared, peer: int, place: tuple[int, int, int], num_words: int) -> None:
    """Open the file of another rank, and a pidfd of its process.

    Hazard: in two containers, the same process id means different processes. Guard: the number of
    the inode must match. Test: ``test_a_rank_opens_no_file_but_that_of_the_other_rank``.

    Args:
        shared: The record to which this function adds the file.
        peer: The other rank.
        place: Its process id, the descriptor of its file there, and the inode of the file.
        num_words: The number of control words.
    """
    process, number, inode = place
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY)
    opened = PeerFile(file, num_words)  # closes the descriptor when it is dropped
    if os.fstat(file).st_ino != inode:
        raise OSError(f"process id {process} belongs to another process here")
    opened.pidfd = os.pidfd_open(process)
    weakref.finalize(opened, os.close, opened.pidfd).atexit = False
    shared.files[peer] = opened
