"""The order in which groups are needed: recorded once, then used. Pure.

The first pass records who was needed after whom. From the second on, the record says whom to
gather while the present one computes, and whom not to free because it is needed again at once.
A wrong guess costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class OrderRecord(Generic[Key]):
    """Records the order of one kind of pass and predicts the next one from it."""

    def __init__(self) -> None:
        self.recorded: tuple[Key, ...] = ()
        self._current: list[Key] = []
        self._position = 0

    def advance(self, key: Key) -> Key | None:
        """Note that ``key`` is needed now; return who is expected next, if known."""
        self._current.append(key)
        expected = self.recorded
        position = self._position
        if position >= len(expected) or expected[position] != key:
            position = _find(expected, key, position)
        self._position = position + 1
        return expected[position + 1] if position + 1 < len(expected) else None

    @property
    def upcoming(self) -> Key | None:
        """Who is expected next, if known."""
        return self.recorded[self._position] if self._position < len(self.recorded) else None

    def finish(self) -> None:
        """End the pass; what was recorded predicts the next one."""
        if self._current:
            self.recorded = tuple(self._current)
        self.abandon()

    def abandon(self) -> None:
        """End a pass that failed; the previous record stays."""
        self._current.clear()
        self._position = 0


def _find(order: tuple[Key, ...], key: Key, start: int) -> int:
    """Index of ``key`` at or after ``start``, else anywhere, else past the end."""
    for index in (*range(start, len(order)), *range(min(start, len(order)))):
        if order[index] == key:
            return index
    return len(order)


def stays_for_backward(key: Key, forward: OrderRecord[Key], backward: OrderRecord[Key]) -> bool:
    """Tell whether ``key`` ended the last forward and opened the last backward.

    Such a group would be freed and gathered again with nothing in between.
    """
    return bool(
        forward.recorded
        and backward.recorded
        and forward.recorded[-1] == key
        and backward.recorded[0] == key
    )
