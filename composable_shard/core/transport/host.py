"""Copies between pinned memory of the host and a device, concurrent with compute.

Each direction of a device has a lane: a copy stream. A copy begins after the work that compute has
launched before it. Compute waits for a copy only where it needs the copied values.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from composable_shard import _torch
from composable_shard.core.transport.pending import Waitable

_NUM_KEPT = 2  # copies whose tensors a lane keeps

uploads: dict[torch.device, Lane] = {}
downloads: dict[torch.device, Lane] = {}


class Lane:
    """The stream of all copies in one direction between the host and a device.

    Hazard: memory goes back to the compute stream while a copy still uses it, for example after an
    error, when nothing waits for the copy. Guard: the lane keeps the tensors of the last copies,
    and the stream that launched a copy waits for it before its tensors are released. Test:
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
        """Launch a copy; host memory must not be reused before :meth:`settle`."""
        self.is_busy = True
        with self.behind():
            into.copy_(source, non_blocking=True)
        compute = _torch.current_stream(self._device)
        self._kept.append((compute, self._stream.record_event(), into, source))
        while len(self._kept) > _NUM_KEPT:
            owner, event, *_ = self._kept.popleft()
            owner.wait_event(event)

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Run the block on the copy stream, after its earlier copies and after compute.

        Memory allocated inside belongs to the copy stream; see :meth:`departure`.
        """
        self._stream.wait_stream(_torch.current_stream(self._device))
        with _torch.on_stream(self._stream):
            yield

    def arrival(self) -> Waitable:
        """Return an event: if a compute stream waits for it, it runs after all earlier copies."""
        return self._stream.record_event()

    def departure(self) -> Waitable:
        """Return an object whose ``wait`` makes the copy stream wait for the current stream.

        Hazard: the current stream releases memory of the copy stream, which reuses the memory after
        waiting for another compute stream only. Guard: the copy stream waits for this one too.
        Test: ``test_nothing_is_seen_where_nothing_was_planted``, by "custom, offload, branches".
        """
        return _Departure(self._stream, self._device)

    def settle(self) -> None:
        """Block the host until all copies are complete."""
        if self.is_busy:
            self._stream.synchronize()
            self._kept.clear()
            self.is_busy = False


@dataclass
class _Departure:
    """Makes the copy stream wait for the stream that has used memory of a lane."""

    stream: torch.Stream
    device: torch.device

    def wait(self) -> None:
        self.stream.wait_stream(_torch.current_stream(self.device))


def upload_lane(device: torch.device) -> Lane:
    """Return the lane of the copies to a device."""
    return _lane(uploads, device)


def upload(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy pinned memory to a device on its copy stream, and cast it there.

    Args:
        source: On the host. It must not be written before :func:`settle`.
        into: On the device, of any dtype.
    """
    lane = upload_lane(into.device)
    if source.dtype == into.dtype:
        lane.copy(into, source)
    else:
        staged = _torch.empty_like(source, device=into.device)
        lane.copy(staged, source)
        lane.copy(into, staged)


def download(source: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of a device to pinned memory; the copy is complete after :func:`settle`."""
    is_pinned = _torch.has_streams(source.device)
    into = _torch.empty_like(source, device="cpu", pin_memory=is_pinned)
    _lane(downloads, source.device).copy(into, source)
    return into


def is_busy() -> bool:
    """Return whether a copy may be in flight that the host has not waited for."""
    lanes = [*uploads.values(), *downloads.values()]
    return any(lane.is_busy for lane in lanes)


def settle() -> None:
    """Block the host until all copies in both directions are complete.

    Hazard: user code writes shards that a device has still to read. Guard: every backward, and
    every forward without a backward, ends with this. Test: ``test_copies_may_be_late``.
    """
    for lanes in (uploads, downloads):
        for lane in list(lanes.values()):
            lane.settle()


def _lane(lanes: dict[torch.device, Lane], device: torch.device) -> Lane:
    return lanes.get(device) or lanes.setdefault(device, Lane(device))
