"""The examples in the docstrings run, and every public function and method has one."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import composable_shard
from composable_shard import FSDPModule, fully_shard, testing, trace
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, strategies

ROOT = Path(composable_shard.__file__).parent
LONG = {"testing.strategies", "testing.extension_kit"}
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(), re.M)
]


def names_for(module: str) -> dict[str, object]:
    """Return what the examples of a module may use besides what it has itself."""
    names: dict[str, object] = {}
    if module == "module":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer)
        names = {"model": fully_shard(model), "x": torch.ones(2, 4)}
        names["record_events"] = record_events
    if module.startswith(("insight.trace", "insight.merging")):
        names = {"torch": torch, "nn": nn, "fully_shard": fully_shard}
        names |= {"trace": trace, "fake_ranks": fake_ranks}
    return names


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.matrix) if name in LONG else name
        for name in WITH_EXAMPLES
    ],
)
def test_examples_run(module: str) -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(importlib.import_module(f"composable_shard.{module}"))
    examples = [test for test in found if test.examples]
    assert examples
    for example in examples:
        with fake_ranks(2) if module == "module" else contextlib.nullcontext():
            example.globs.update(names_for(module))
            runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
            runner.run(example)
            assert runner.summarize(verbose=False).failed == 0


def test_every_public_name_has_an_example() -> None:
    without = [
        name
        for name in composable_shard.__all__
        if ">>>" not in (getattr(composable_shard, name).__doc__ or "")
        and not issubclass_of_errors(getattr(composable_shard, name))
    ]
    assert without == ["FSDPModule", "UnshardHandle"]  # their methods have


def test_everything_public_of_the_kit_has_an_example() -> None:
    public = [getattr(testing, name) for name in testing.__all__ if name not in ("STEPS", "Step")]
    own = [one for name, one in vars(strategies).items() if not name.startswith("_")]
    public += [one for one in own if getattr(one, "__module__", "") == strategies.__name__]
    without = [one.__name__ for one in public if ">>>" not in (one.__doc__ or "")]
    assert without == ["RankError", "RankFailure", "RankTimeout"]  # nobody makes them


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
