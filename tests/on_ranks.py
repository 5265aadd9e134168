"""Tests that run on ranks as a whole: what stands in them is done by each of several processes."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composable_shard.testing import run_ranks


@dataclass(frozen=True)
class Body:
    """What stands in a test, by the test's name: ranks import it."""

    module: str
    name: str

    def __call__(self, **arguments: Any) -> None:
        getattr(importlib.import_module(self.module), self.name).__wrapped__(**arguments)


def on_ranks(
    count: int | str, timeout: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on ranks, each of which gets the test's arguments.

    Args:
        count: How many, or the name of the parameter that says so. The test takes it if it is the
            extents of a mesh, and not if it is a number.
        timeout: Seconds, as for ``run_ranks``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            num_ranks = arguments[count] if isinstance(count, str) else count
            if isinstance(num_ranks, tuple):
                num_ranks = math.prod(num_ranks)
            arguments = {name: arguments[name] for name in signature.parameters}
            run_ranks(Body(body.__module__, body.__name__), num_ranks, timeout=timeout, **arguments)

        parameters = list(signature.parameters.values())
        if isinstance(count, str) and count not in signature.parameters:
            parameters.append(inspect.Parameter(count, inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return decorate
