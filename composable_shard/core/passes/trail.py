"""Which groups forwards have entered and left, in order; a backward goes back over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from composable_shard.core.group import ParamGroup


class Place(NamedTuple):
    """Where a forward first entered a group, or last left it."""

    group: ParamGroup
    side: Literal["entered", "left"]


class Trail:
    """The places of all forwards that may have a backward, the latest last.

    A group that is called several times is read in backward from its last call to its first. So it
    is gathered where it was left last, and complete where it was entered first.
    """

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}
        self._running: set[ParamGroup] = set()  # entered by the forward that is running

    def begin(self) -> None:
        """Note that a forward begins: where it enters groups counts, not where others did."""
        self._running.clear()

    def enter(self, group: ParamGroup) -> None:
        """Note that ``group`` is entered."""
        if group not in self._running:
            self._running.add(group)
            self._put(Place(group, "entered"))

    def leave(self, group: ParamGroup) -> None:
        """Note that ``group`` is left."""
        self._put(Place(group, "left"))

    def __contains__(self, group: ParamGroup) -> bool:
        """Tell whether ``group`` was left and not walked over since."""
        return Place(group, "left") in self._places

    def forget(self, group: ParamGroup) -> None:
        """Forget where ``group`` was left."""
        self._places.pop(Place(group, "left"), None)

    def clear(self) -> None:
        """Forget all."""
        self._places.clear()
        self._running.clear()

    def back_to(self, group: ParamGroup | None) -> Iterator[Place]:
        """Walk back to where ``group`` was left, or over all; forget what was walked over."""
        end = None if group is None else Place(group, "left")
        if end is not None and end not in self._places:
            return
        while self._places:
            place, _ = self._places.popitem()
            if place == end:
                return
            yield place

    def _put(self, place: Place) -> None:
        self._places.pop(place, None)
        self._places[place] = None
