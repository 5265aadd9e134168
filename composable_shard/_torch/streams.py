"""Streams of devices. The CPU has none, and runs all work at once.

The rest of the library uses streams only through this module. So ``composable_shard.testing`` can
simulate a device by giving streams to the CPU.
"""

from __future__ import annotations

import contextlib

import torch


def has_streams(device: torch.device) -> bool:
    """Return whether ``device`` runs launched work asynchronously."""
    return device.type != "cpu"


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread launches work for ``device``."""
    return torch.accelerator.current_stream(device)


def make_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of ``device``."""
    return torch.Stream(device)


def on_stream(stream: torch.Stream) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes ``stream`` and its device current.

    Hazard: a stream object stores the previous stream for all threads together, and in torch 2.11 a
    stream cannot be entered twice at once. Guard: a new object for each context.
    """
    return torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def pins_memory() -> bool:
    """Return whether host memory can be pinned, which needs an accelerator."""
    return torch.accelerator.is_available()
