"""When something happens on a rank: on the host, or in the order of the device's work.

A device works behind the host that tells it what to do. What counts there is when the work is
done, so an event is recorded among it, which costs no waiting; the times of all events are read at
the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Gives stamps while it must be quick, and times of them afterwards."""

    def stamp(self) -> Any:
        """Return what :meth:`times` turns into a time."""

    def times(self, stamps: Sequence[Any]) -> list[int]:
        """Return the nanoseconds of the host's clock at which the stamps were given."""


class HostClock:
    """The monotonic clock of the host, which all processes on it share."""

    stamp = staticmethod(time.perf_counter_ns)

    def times(self, stamps: Sequence[int]) -> list[int]:
        """Return the stamps, which are times."""
        return list(stamps)


class DeviceClock:
    """Events between the kernels of an accelerator.

    It is set by the host's clock when it is made, which waits for the device once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self.stamp()
        self._base.synchronize()
        self._base_time = time.perf_counter_ns()

    def stamp(self) -> torch.Event:
        """Record an event after the work that the current stream has so far."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def times(self, stamps: Sequence[torch.Event]) -> list[int]:
        """Wait for the device and return when it came by each event."""
        torch.accelerator.synchronize(self._device)
        return [
            self._base_time + round(self._base.elapsed_time(stamp) * 1_000_000) for stamp in stamps
        ]


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which work on ``device`` is timed."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
