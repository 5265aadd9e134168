"""Memory of the host that is parked as that of a device would be."""

from __future__ import annotations

from typing import Any
from unittest import mock

from composable_shard.train.parking import parked


def as_device() -> Any:
    """Take all memory for that of a device."""
    return mock.patch.object(parked, "_is_on_device", lambda _: True)
