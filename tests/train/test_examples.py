"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = {
    "api": 2,
    "compat.fsdp1.choices": 3,
    "compat.fsdp1.module": 1,
    "compat.fsdp1.optimizer_states": 1,
    "compat.fsdp1.saving": 3,
    "compat.fsdp1.wrap_policies": 6,
    "train.clip": 1,
    "train.synchronize": 1,
    "train.unsharded": 1,
    "train.wrap": 1,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"composable_shard.{name}")
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test for test in finder.find(module) if test.examples]
    assert len(examples) == MODULES[name]
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
