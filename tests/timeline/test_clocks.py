"""Clocks: that of the host, and events on a device, here one that is played."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from composable_shard.insight import trace
from composable_shard.insight.trace import Clock, DeviceClock, clock_of, live_memory


class PlayedDevice:
    """A device that comes by an event two milliseconds after the one before."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_recorded = 0

    def event(self, device: torch.device, *, enable_timing: bool) -> PlayedEvent:
        assert enable_timing and device.type == "cuda"
        return PlayedEvent(self)

    def synchronize(self, _: torch.device) -> None:
        self.calls.append("wait for the device")


class PlayedEvent:
    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self.time = -1.0

    def record(self, stream: str) -> None:
        self._device.calls.append(f"record on {stream}")
        self._device.num_recorded += 1
        self.time = 2.0 * self._device.num_recorded

    def synchronize(self) -> None:
        self._device.calls.append("wait for an event")

    def elapsed_time(self, later: PlayedEvent) -> float:
        return later.time - self.time


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    device = PlayedDevice()
    monkeypatch.setattr(trace.torch, "Event", device.event)
    monkeypatch.setattr(trace.torch.accelerator, "synchronize", device.synchronize)
    monkeypatch.setattr(trace.torch.accelerator, "current_stream", lambda _: "the current stream")
    monkeypatch.setattr(trace.time, "perf_counter_ns", lambda: 5_000_000)
    return device


def test_a_device_is_waited_for_at_the_begin_and_at_the_end_alone(played: PlayedDevice) -> None:
    clock = clock_of(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock)
    assert played.calls == ["record on the current stream", "wait for an event"]
    played.calls.clear()
    stamps = [clock.stamp() for _ in range(3)]
    assert played.calls == ["record on the current stream"] * 3
    assert clock.times(stamps) == [7_000_000, 9_000_000, 11_000_000]
    assert played.calls[3:] == ["wait for the device"]


def test_the_clock_of_the_host_gives_times_at_once() -> None:
    clock = clock_of(torch.device("cpu"))
    assert type(clock) is Clock
    before = time.perf_counter_ns()
    stamp = clock.stamp()
    assert before <= stamp <= time.perf_counter_ns()
    assert clock.times([stamp]) == [stamp]


def test_memory_of_the_heap_rises_and_falls_with_a_tensor() -> None:
    read, of = live_memory(torch.device("cpu"))
    if of != "heap":
        pytest.skip(f"the C library here does not tell its heap, memory is that of {of}")
    assert read is not None
    before = read()[0]
    tensor = torch.zeros(1 << 22)
    assert read()[0] - before == pytest.approx(tensor.nbytes, rel=0.01)
    del tensor
    assert read()[0] - before == pytest.approx(0, abs=1 << 18)
    assert read()[1] is None


def test_a_device_is_asked_for_what_its_allocator_has_handed_out_and_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def stats(index: int) -> dict[str, Any]:
        asked.append(index)
        kinds = {"allocated_bytes": 77, "reserved_bytes": 99}
        return {kind: {"all": {"current": nbytes}} for kind, nbytes in kinds.items()}

    has_begun = iter([False, True])
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", has_begun.__next__)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", stats)
    read, of = live_memory(torch.device("cuda", 3))
    assert read is not None and of == "device"
    assert [read(), read()] == [(0, 0), (77, 99)]  # nothing is known before the first use
    assert asked == [3]
