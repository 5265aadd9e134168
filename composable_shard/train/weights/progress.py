"""The progress bar of reading and writing weights."""

from __future__ import annotations

from typing import Any

from composable_shard.train.extras import library
from composable_shard.train.weights.files import EXTRA


class Progress:
    """A bar of bytes on the terminal; nothing if it is not shown.

    Args:
        title: What stands before it.
        num_bytes: How many there are.
        shown: Whether it is shown.
    """

    def __init__(self, title: str, num_bytes: int, *, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            self._bar = library("tqdm", EXTRA).tqdm(
                desc=title, total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        if self._bar is not None:
            self._bar.update(num_bytes)
