"""Where forwards have entered and left groups, as a backward walks back over it."""

from __future__ import annotations

from typing import Any

import pytest

from composable_shard.core.passes.trail import Trail


def walked(trail: Trail, group: str | None) -> list[str]:
    return [f"{group} {side}" for group, side in trail.back_to(group)]  # type: ignore[arg-type]


def trail_of(*forwards: str) -> Trail:
    """Follow forwards: ``"a"`` enters group ``a``, ``"A"`` leaves it."""
    trail: Any = Trail()
    for forward in forwards:
        trail.begin()
        for letter in forward:
            if letter.islower():
                trail.enter(letter)
            else:
                trail.leave(letter.lower())
    return trail


CASES = [
    ("one after the other", ["raAbBR"], ["r left", "b left", "b entered", "a left", "a entered"]),
    ("nested", ["raabBAR"], ["r left", "a left", "b left", "b entered", "a entered"]),
    ("twice", ["raAbBaAbBR"], ["r left", "b left", "a left", "b entered", "a entered"]),
    ("two forwards", ["raAR", "raAR"], ["r left", "a left", "a entered"]),
    ("parts by themselves", ["aA", "bB"], ["b left", "b entered", "a left", "a entered"]),
    ("frozen, so never left", ["rabBR"], ["r left", "b left", "b entered", "a entered"]),
]


@pytest.mark.parametrize(
    ("forwards", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_groups_are_walked_over_as_backward_comes_to_them(
    forwards: list[str], expected: list[str]
) -> None:
    trail = trail_of(*forwards)
    root = ["r entered"] if forwards[0].startswith("r") else []
    assert walked(trail, None) == expected + root
    assert walked(trail, None) == []


def test_a_walk_ends_where_the_group_was_left() -> None:
    trail = trail_of("raAbBcCR")
    assert walked(trail, "r") == []
    assert walked(trail, "b") == ["c left", "c entered"]
    assert walked(trail, "b") == []  # it is behind
    assert walked(trail, "a") == ["b entered"]
    trail.clear()
    assert walked(trail, None) == []


def test_a_group_whose_place_is_forgotten_is_not_walked_to() -> None:
    trail: Any = trail_of("raAbBR")
    trail.forget("b")
    assert walked(trail, "b") == []
    assert walked(trail, "a") == ["r left", "b entered"]
