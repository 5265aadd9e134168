"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch
from torch import nn

from composable_shard import fully_shard, trace
from composable_shard.testing import fake_ranks

MODULES = ("analysis", "merging", "spans")


@pytest.mark.parametrize("name", ["trace", *(f"timeline.{name}" for name in MODULES)])
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(f"composable_shard.insight.{name}")
    names = {"torch": torch, "nn": nn, "fully_shard": fully_shard}
    more = {"trace": trace, "fake_ranks": fake_ranks}
    results = doctest.testmod(module, extraglobs={**names, **more})
    assert results.attempted > 0 and results.failed == 0
