"""Start ranks for a benchmark from a checkout, installed or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

REPOSITORY = str(Path(__file__).resolve().parents[1])
LONGEST_CALL = 1800.0  # seconds


def on_ranks(fn: Callable[..., Result], num_ranks: int, *args: object) -> list[Result]:
    """Run `fn(*args)` on ranks that stay alive, so module globals that `fn` sets persist."""
    if REPOSITORY not in sys.path:
        sys.path.append(REPOSITORY)
    from composable_shard.testing import run_ranks

    return run_ranks(fn, num_ranks, *args, timeout=LONGEST_CALL)


def on_fresh_ranks(fn: Callable[..., Result], num_ranks: int, *args: object) -> list[Result]:
    """Run `fn(*args)` on ranks that have run nothing before, and end them."""
    end_ranks()
    try:
        return on_ranks(fn, num_ranks, *args)
    finally:
        end_ranks()


def first_failure(error: RuntimeError) -> str:
    """Return the output of the first failing rank; the others are mostly the same."""
    failures = getattr(error, "failures", ())
    return str(failures[0]) if failures else str(error)


def end_ranks() -> None:
    if REPOSITORY not in sys.path:
        sys.path.append(REPOSITORY)
    from composable_shard.testing import stop_ranks

    stop_ranks()
