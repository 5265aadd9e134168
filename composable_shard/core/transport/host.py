"""Copies between pinned memory of the host and a device, concurrent with compute.

A device has one copy stream for each direction. A copy begins after the earlier
work of the compute stream, which waits for a copy only where it needs the copied values.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from composable_shard import _torch
from composable_shard.core.transport.pending import Waitable

_NUM_KEPT = 2  # a copy stream keeps the tensors of this many copies

uploads: dict[torch.device, CopyStream] = {}
downloads: dict[torch.device, CopyStream] = {}


class CopyStream:
    """The stream of all copies in one direction between the host and a device.

    Hazard: memory goes back to the compute stream while a copy still uses it, for example after an
    error, when nothing waits for the copy. Guard: this object keeps the tensors of the last
    copies, and the stream that launched a copy waits for it before its tensors are released. Test:
    ``test_tensors_are_kept_until_compute_continues_after_their_copy``.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_busy = False
        self._device = device
        self._stream = _torch.make_stream(device)
        self._kept: deque[tuple[torch.Stream, torch.Event, torch.Tensor, torch.Tensor]] = deque()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy; host memory must not be reused before :meth:`synchronize`."""
        self.is_busy = True
        with self.after_compute():
            into.copy_(source, non_blocking=True)
        launching = _torch.current_stream(self._device)
        self._kept.append((launching, self._stream.record_event(), into, source))
        while len(self._kept) > _NUM_KEPT:
            launching, event, *_ = self._kept.popleft()
            launching.wait_event(event)

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the block on the copy stream, after its earlier copies and after compute.

        Memory that the block allocates belongs to the copy stream; see :meth:`reuse_guard`.
        """
        self._stream.wait_stream(_torch.current_stream(self._device))
        with _torch.on_stream(self._stream):
            yield

    def copies_event(self) -> Waitable:
        """Return an event that is complete after all copies launched so far."""
        return self._stream.record_event()

    def reuse_guard(self) -> Waitable:
        """Return an object whose ``wait`` makes the copy stream wait for the current stream.

        Hazard: memory of the copy stream is released on stream A. The next copy is launched from
        stream B, waits for B only, and overwrites what A still reads. Guard: the copy stream waits
        for A, too.
        Test: ``test_nothing_is_seen_where_nothing_was_planted[custom, offload, branches]``.
        """
        return _ReuseGuard(self._stream, self._device)

    def synchronize(self) -> None:
        """Block the host until all copies are complete."""
        if self.is_busy:
            self._stream.synchronize()
            self._kept.clear()
            self.is_busy = False


@dataclass
class _ReuseGuard:
    """``wait`` makes the copy stream wait for the current stream, which has used its memory."""

    copy_stream: torch.Stream
    device: torch.device

    def wait(self) -> None:
        self.copy_stream.wait_stream(_torch.current_stream(self.device))


def upload_stream(device: torch.device) -> CopyStream:
    """Return the stream of the copies to a device."""
    return _copy_stream(uploads, device)


def upload(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy pinned memory to a device on its copy stream, and cast it there.

    Args:
        source: On the host. It must not be written before :func:`synchronize`.
        into: On the device, of any dtype.
    """
    copies = upload_stream(into.device)
    if source.dtype == into.dtype:
        copies.copy(into, source)
    else:
        staged = _torch.empty_like(source, device=into.device)
        copies.copy(staged, source)
        copies.copy(into, staged)


def download(source: torch.Tensor) -> torch.Tensor:
    """Copy a device tensor to pinned memory; it is complete after :func:`synchronize`."""
    is_pinned = _torch.has_streams(source.device)
    into = _torch.empty_like(source, device="cpu", pin_memory=is_pinned)
    _copy_stream(downloads, source.device).copy(into, source)
    return into


def is_busy() -> bool:
    """Return whether the host has yet to wait for a copy."""
    return any(stream.is_busy for stream in [*uploads.values(), *downloads.values()])


def synchronize() -> None:
    """Block the host until all copies in both directions are complete.

    Hazard: user code writes shards that a device has yet to read. Guard: every outer backward, and
    every forward that cannot have one, ends with this; ``load_state_dict`` and optimizer steps
    begin with it. Test: ``test_copies_may_be_late``.
    """
    for stream in [*uploads.values(), *downloads.values()]:
        stream.synchronize()


def _copy_stream(streams: dict[torch.device, CopyStream], device: torch.device) -> CopyStream:
    return streams.get(device) or streams.setdefault(device, CopyStream(device))
