"""The garbage collector, looking at new objects alone: the thousands of a test run take seconds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def seen_alone() -> Iterator[None]:
    """Let ``gc.collect()`` and ``gc.get_objects()`` see only what is made inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
