"""Memory of this process that lies in a file for a while, at the same addresses.

The values are written to a file without a name, and the file is mapped where they were. Whoever
reads them finds them still, from the disk. Nothing that points there, a view, an array of NumPy,
has to know. Coming back, fresh memory is filled from the file and put in its place as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from composable_shard.errors import ShardError

MIN_NBYTES = 64 * 1024
"""Less than this stays where it is: each piece is one of some 60000 mappings of a process."""

_MOST_AT_ONCE = 2**26  # bytes of one read or write


class Span(NamedTuple):
    """A range of addresses, ``start`` to ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.end - self.start


# PURE: which addresses --------------------------------------------------------------------------


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of ranges, sorted; those that touch become one.

    Example:
        >>> merged([Span(4, 8), Span(0, 4), Span(2, 3), Span(9, 9)])
        [Span(start=0, end=8)]
    """
    found: list[Span] = []
    for span in sorted(span for span in spans if span.nbytes > 0):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def whole_pages(spans: Iterable[Span], within: Iterable[Span], page: int) -> list[Span]:
    """Return the pages that lie in ``spans`` as a whole, and in one of ``within``.

    Args:
        spans: Sorted ranges that do not touch.
        within: The same; where pages may be replaced.
        page: Bytes of a page.

    Example:
        >>> whole_pages([Span(3, 35)], [Span(0, 100)], 10)
        [Span(start=10, end=30)]
    """
    places, found = list(within), []
    for span in spans:
        pages = Span(-(-span.start // page) * page, span.end // page * page)
        place = bisect_right(places, (pages.start, sys.maxsize)) - 1
        if pages.nbytes > 0 and place >= 0 and pages.end <= places[place].end:
            found.append(pages)
    return found


def private_mappings(maps: Iterable[str]) -> list[Span]:
    """Return where this process has memory that is no file's and nobody else's.

    Args:
        maps: The lines of ``/proc/self/maps``.

    Example:
        >>> private_mappings(["1000-2000 rw-p 00000000 00:00 0", "2000-3000 rw-s 0 00:01 7 /x"])
        [Span(start=4096, end=8192)]
    """
    found = []
    for line in maps:
        addresses, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            start, end = (int(number, 16) for number in addresses.split("-"))
            found.append(Span(start, end))
    return merged(found)


def movable_pages(spans: Iterable[Span]) -> list[Span]:
    """Return the pages in ranges of addresses that can be moved; none but on Linux."""
    if sys.platform != "linux":
        return []
    with open("/proc/self/maps") as maps:
        pages = whole_pages(merged(spans), private_mappings(maps), mmap.PAGESIZE)
    return [span for span in pages if span.nbytes >= MIN_NBYTES]


# The file -----------------------------------------------------------------------------------------


class HostPages:
    """Pages of this process, in a file.

    Args:
        folder: Where the file is; it has no name there, and goes with this process.
        spans: Ranges of addresses that somebody keeps allocated meanwhile.

    Attributes:
        spans: The pages that can be moved.

    Raises:
        OSError: If the file cannot be made.
        ShardError: On a system other than Linux.
    """

    def __init__(self, folder: str | os.PathLike[str], spans: Iterable[Span]) -> None:
        if sys.platform != "linux":
            raise ShardError(
                f"Expected Linux to move memory of the host to a file, got {sys.platform}; leave "
                "out folder, so that only memory of devices is moved"
            )
        os.makedirs(folder, exist_ok=True)
        self.spans = movable_pages(spans)
        self._mapped: list[tuple[Span, int]] = []
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def copy(self) -> None:
        """Write the values; nothing else changes.

        Raises:
            OSError: If the disk is full, for one.
        """
        for span, place in self._places():
            for first, nbytes in _parts(span):
                done = 0
                while done < nbytes:
                    part = _memory(first + done, nbytes - done)
                    done += os.pwrite(self._file.fileno(), part, place + first - span.start + done)

    def let_go(self) -> list[Span]:
        """Give the memory back to the system; return what of it the system has taken.

        Hazard: somebody frees the memory before it has come back, and the allocator gives it to
        others; a forked process has it, too. Guard: what is written there is in no file, and each
        process's own. Test: ``test_what_a_forked_process_writes_is_its_own``.
        """
        both, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        for span, place in self._places():
            if _mmap(span.start, span.nbytes, both, how, self._file.fileno(), place) is None:
                break  # there are too many mappings: the others stay
            self._mapped.append((span, place))
        with contextlib.suppress(OSError):  # what stays in the cache is there for others to take
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return [span for span, _ in self._mapped]

    def come_back(self) -> None:
        """Have the values in memory again, also those that were changed meanwhile.

        What cannot be read stays in the file, where it can be used as before.

        Raises:
            OSError: If there is no memory, or the file cannot be read.
        """
        while self._mapped:
            span, place = self._mapped[-1]
            self._read(span, place)
            self._mapped.pop()
        self.close()

    def close(self) -> None:
        """Let go of the file; what is mapped stays readable."""
        self._file.close()

    def _read(self, span: Span, place: int) -> None:
        """Fill fresh memory, and put it in the place of the file in one step.

        What cannot be read from the file is an error here; where it is mapped it would be a signal.
        What was written there meanwhile is not in the file, so all is copied from there once it has
        been read.
        """
        both, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        fresh = _mmap(None, span.nbytes, both, how, -1, 0)
        if fresh is None:
            raise _error_of(ctypes.get_errno())
        try:
            for first, nbytes in _parts(Span(fresh, fresh + span.nbytes)):
                done = 0
                while done < nbytes:
                    part, start = _memory(first + done, nbytes - done), place + first - fresh + done
                    count = os.preadv(self._file.fileno(), [part], start)
                    if not count:
                        raise _error_of(errno.EIO)
                    done += count
                ctypes.memmove(first, first - fresh + span.start, nbytes)
            _moved(fresh, span)
        except BaseException:
            _libc().munmap(fresh, span.nbytes)
            raise

    def _places(self) -> Iterator[tuple[Span, int]]:
        """Yield the pages, and where in the file they begin."""
        place = 0
        for span in self.spans:
            yield span, place
            place += span.nbytes


def _parts(span: Span) -> Iterator[tuple[int, int]]:
    bounds = [*range(span.start, span.end, _MOST_AT_ONCE), span.end]
    yield from ((start, end - start) for start, end in pairwise(bounds))


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


# What the system is asked for ---------------------------------------------------------------------

_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    libc.mmap.argtypes = [address, word, number, number, number, ctypes.c_int64]
    libc.mmap.restype = address
    libc.munmap.argtypes = [address, word]
    libc.mremap.argtypes = [address, word, word, number, address]
    libc.mremap.restype = address
    return libc


def _mmap(
    address: int | None, nbytes: int, access: int, how: int, file: int, place: int
) -> int | None:
    found: int | None = _libc().mmap(address, nbytes, access, how, file, place)
    return None if found in (None, _FAILED) else found


def _moved(fresh: int, span: Span) -> None:
    """Put memory in the place of a mapping."""
    how = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if _libc().mremap(fresh, span.nbytes, span.nbytes, how, span.start) != span.start:
        raise _error_of(ctypes.get_errno())


def _error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))
