"""The examples in the docstrings of the kit run, and everything public has one."""

from __future__ import annotations

import doctest
import importlib

import pytest

import composable_shard.testing as kit
from composable_shard.testing import strategies

MODULES = ("programs", "strategies", "training")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(f"composable_shard.testing.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


def test_everything_public_has_an_example() -> None:
    public = [getattr(kit, name) for name in kit.__all__ if name not in ("STEPS", "Step")]
    public += [getattr(strategies, n) for n in strategies.__all__ if n != "AccumulationStep"]
    without = [one.__name__ for one in public if ">>>" not in (one.__doc__ or "")]
    assert without == ["RankError", "RankFailure", "RankTimeout"]  # nobody makes them
