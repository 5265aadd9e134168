"""Makes a failing case smaller, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from .program import Case

KEPT = ("seed", "name", "names")


def shrunk(case: Case, fails: Callable[[Case], bool], max_runs: int) -> Case:
    """Return a case that still fails and of which nothing more can be left out."""
    runs = 0
    again = True
    while again:
        again = False
        for smaller in simpler(case):
            if runs >= max_runs:
                return case
            runs += 1
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def simpler(value: Any) -> Iterator[Any]:
    """Yield values with one part less, or with one part as it is by default, or simpler."""
    if is_dataclass(value):
        for one in fields(value):
            own = getattr(value, one.name)
            if one.name in KEPT or own == one.default:
                continue
            if one.default is not MISSING:
                yield replace(value, **{one.name: one.default})
            for less in simpler(own):
                yield replace(value, **{one.name: less})
    elif isinstance(value, frozenset):
        for one in sorted(value):
            yield value - {one}
    elif isinstance(value, tuple):
        for place in range(len(value)) if len(value) > 1 else ():
            yield value[:place] + value[place + 1 :]
        for place, one in enumerate(value):
            for less in simpler(one):
                yield (*value[:place], less, *value[place + 1 :])
