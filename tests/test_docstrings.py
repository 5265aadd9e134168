"""The examples in the docstrings run, and every public function and method has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import composable_shard
from composable_shard import FSDPModule, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks

MODULES = [
    "api",
    "core.transport.collectives",
    "insight.estimate",
    "insight.explain",
    "insight.report",
    "mesh",
    "policy",
    "testing.extension_kit.kit",
    "train.checkpoint",
    "train.clip",
    "train.grad_scaler",
    "train.synchronize",
    "train.unsharded",
    "train.weights.load",
    "train.weights.save",
    "train.wrap",
]


def examples_of(name: str) -> Iterator[doctest.DocTest]:
    module = importlib.import_module(f"composable_shard.{name}")
    finder = doctest.DocTestFinder(exclude_empty=True)
    return (test for test in finder.find(module) if test.examples)


def run(example: doctest.DocTest) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_functions_and_classes(name: str) -> None:
    examples = list(examples_of(name))
    assert examples
    for example in examples:
        run(example)


def test_examples_of_methods() -> None:
    for example in examples_of("module"):
        with fake_ranks(2):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            for layer in model:
                fully_shard(layer)
            x = torch.ones(2, 4)
            names = {"model": fully_shard(model), "x": x, "record_events": record_events}
            example.globs.update(names)
            run(example)


def test_every_public_name_has_an_example() -> None:
    without = [
        name
        for name in composable_shard.__all__
        if ">>>" not in (getattr(composable_shard, name).__doc__ or "")
        and not issubclass_of_errors(getattr(composable_shard, name))
    ]
    assert without == ["FSDPModule", "UnshardHandle"]  # their methods have


def issubclass_of_errors(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def test_every_method_has_an_example() -> None:
    methods = [
        (name, member)
        for owner in FSDPModule.__mro__
        if owner.__module__.startswith("composable_shard")
        for name, member in vars(owner).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]
    assert len(methods) > 25
    without = [name for name, member in methods if ">>>" not in (member.__doc__ or "")]
    assert without == ["set_reduce_scatter_divide_factor"]  # deprecated
