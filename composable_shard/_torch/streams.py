"""Streams: what a device does in order. The CPU has none, and does everything at once.

Whatever asks whether work is queued, and on which stream, asks here; so does the simulated device
of ``composable_shard.testing``, which gives streams to the CPU.
"""

from __future__ import annotations

import contextlib

import torch


def has_streams(device: torch.device) -> bool:
    """Tell whether what is launched on ``device`` may be done later than it is launched."""
    return device.type != "cpu"


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which ``device`` is being given work by this thread."""
    return torch.accelerator.current_stream(device)


def make_stream(device: torch.device) -> torch.Stream:
    """Return another stream of ``device``."""
    return torch.Stream(device)


def on_stream(stream: torch.Stream) -> contextlib.AbstractContextManager[object]:
    """Give work to ``stream``, and to its device, inside.

    Hazard: a stream object remembers what was current before it, for all threads together, and
    torch 2.11 lets none be entered again before it is left. Guard: an object for each time.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def pins_memory() -> bool:
    """Tell whether memory of the host can be pinned: whether there is a device to copy it to."""
    return torch.accelerator.is_available()
