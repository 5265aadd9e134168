"""Copies between pinned memory of the host and a device, beside compute.

Each direction of a device has a lane. A copy begins after what compute has launched before it;
compute goes on meanwhile, and continues after the copy only where it needs what was copied.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from composable_shard.core.comms.streams import Waitable, wait_for_event

_MOST_LENT = 2  # downloads whose sources are kept at once

_uploads: dict[torch.device, Lane] = {}
_downloads: dict[torch.device, Lane] = {}


class Lane:
    """The copies in one direction of one device, in order, on a stream of their own.

    Memory of the device is allocated and freed on the compute stream, as everywhere.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._is_busy = False
        self._lent: deque[tuple[Waitable, torch.Tensor]] = deque()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy. The caller keeps both tensors; see :meth:`arrival` and :meth:`lend`."""
        self._is_busy = True
        with self.behind():
            into.copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Let what is launched inside begin after the copies so far, and after compute."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def arrival(self) -> Waitable:
        """Return what makes the compute stream continue after the copies so far.

        Then the memory of the device that they use may be freed.
        """
        return _Arrival(self._stream.record_event(), self._device)

    def lend(self, source: torch.Tensor) -> None:
        """Keep the source of the copy that was launched last as long as it is read.

        Hazard: gradients of a whole model wait on the device for the end of backward. Guard: when
        there are more than a few, compute continues after the oldest copy, which is over by then.
        """
        self._lent.append((self.arrival(), source))
        while len(self._lent) > _MOST_LENT:
            arrival, _ = self._lent.popleft()
            arrival.wait()

    def settle(self) -> None:
        """Wait, on the host, until all copies have been made."""
        if self._is_busy:
            self._stream.synchronize()
            self._lent.clear()
            self._is_busy = False


@dataclass
class _Arrival:
    """The moment when some copies have been made."""

    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        wait_for_event(self.event, self.device)


def upload(source: torch.Tensor, into: torch.Tensor) -> tuple[Lane, list[torch.Tensor]]:
    """Copy pinned memory to a device; it is cast there.

    Args:
        source: On the host. It must not be written before :func:`settle`.
        into: On the device, of any dtype.

    Returns:
        The lane of the copy, and the tensors to keep until compute continues after it.
    """
    lane = _lane(_uploads, into.device)
    if source.dtype == into.dtype:
        lane.copy(into, source)
        return lane, [into]
    staged = torch.empty_like(source, device=into.device)
    lane.copy(staged, source)
    lane.copy(into, staged)
    return lane, [staged, into]


def download(source: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of a device to pinned memory; it is complete after :func:`settle`."""
    lane = _lane(_downloads, source.device)
    into = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type != "cpu")
    lane.copy(into, source)
    lane.lend(source)
    return into


def settle() -> None:
    """Wait, on the host, until what was launched so far has been copied, both ways.

    Hazard: code of the user's writes shards that a device is still to read, or reads gradients that
    have not come. Guard: every pass ends with this.
    """
    for lanes in (_uploads, _downloads):
        for lane in lanes.values():
            lane.settle()


def _lane(lanes: dict[torch.device, Lane], device: torch.device) -> Lane:
    lane = lanes.get(device)
    if lane is None:
        lane = lanes[device] = Lane(device)
    return lane
