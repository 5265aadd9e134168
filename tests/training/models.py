"""Cases of models and losses that ranks look up by name, and train sharded as unsharded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import Step, assert_trains_like_unsharded

W = 4
PROGRAM: list[Step] = ["backward", "step", "accumulate", "backward", "step"]


class Parts(nn.Module):
    """Modules, parameters and values by name, and a function that computes with them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*(sizes or (W, W)))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def sq(value: torch.Tensor) -> torch.Tensor:
    return value.square().sum()


@dataclass(frozen=True)
class Case:
    """A model, and its loss of a batch on a rank.

    Attributes:
        build: Makes the model.
        loss: Computes it of the model, a batch and the rank.
        options: Of ``assert_trains_like_unsharded``.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Any, torch.Tensor, int], torch.Tensor] = lambda model, x, _: sq(model(x))
    options: dict[str, Any] = field(default_factory=dict)


Cases = dict[str, Case]


@dataclass(frozen=True)
class Named:
    """A case in a table of a module."""

    module: str
    table: str
    name: str

    def case(self) -> Case:
        found: Case = getattr(importlib.import_module(self.module), self.table)[self.name]
        return found

    def __call__(self) -> nn.Module:
        return self.case().build()


@dataclass(frozen=True)
class LossOf(Named):
    def __call__(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:  # type: ignore[override]
        return self.case().loss(model, torch.randn(3, W), rank)


def check(module: str, table: str, name: str, **options: Any) -> None:
    """Train a case."""
    key = module, table, name
    options = {**Named(*key).case().options, "loss": LossOf(*key), **options}
    program = options.pop("program", PROGRAM)
    assert_trains_like_unsharded(Named(*key), program, timeout=30, **options)


def shard_all(model: nn.Module, **options: Any) -> nn.Module:
    """Make each part with parameters of its own a group."""
    for module in reversed(list(model.modules())[1:]):
        if any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, **options)
    return fully_shard(model, **options)
