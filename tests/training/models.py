"""Cases of models and losses that ranks look up by name, and train sharded as unsharded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from nets import Net
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import Step, assert_trains_like_unsharded

W = 4
PROGRAM: list[Step] = ["backward", "step", "accumulate", "backward"]


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
    """A model, its loss of a batch on a rank, and options of ``assert_trains_like_unsharded``."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, torch.Tensor, int], torch.Tensor] = lambda model, x, _: sq(model(x))
    options: dict[str, Any] = field(default_factory=dict)


Cases = dict[str, Case]


@dataclass(frozen=True)
class Named:
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
    key = module, table, name
    options = {**Named(*key).case().options, "loss": LossOf(*key), **options}
    program = options.pop("program", PROGRAM)
    assert_trains_like_unsharded(Named(*key), program, timeout=30, **options)


def shard_all(model: nn.Module, **options: Any) -> nn.Module:
    for module in reversed(list(model.modules())[1:]):
        if any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, **options)
    return fully_shard(model, **options)


# Models that store what a loss is computed of, or differentiate within forward -------------------


class Router:
    """A plain object; with slots, and another object inside."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = SimpleNamespace(by_layer={}, config=SimpleNamespace(width=4))


ELSEWHERE: list[torch.Tensor] = []
Store, Load = Callable[[Any, torch.Tensor], object], Callable[[Any], torch.Tensor]
PLACES: dict[str, tuple[Store, Load]] = {
    "attribute": (lambda m, value: setattr(m, "kept", value), lambda m: m.kept),
    "list": (lambda m, value: m.many.append(value), lambda m: m.many.pop()),
    "dict": (lambda m, value: m.named.update(last={"x": value}), lambda m: m.named["last"]["x"]),
    "object": (
        lambda m, value: m.router.inner.by_layer.update(last=[value]),
        lambda m: m.router.inner.by_layer["last"][0],
    ),
    "elsewhere": (lambda m, value: ELSEWHERE.append(value), lambda m: ELSEWHERE.pop()),
}


def store(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Store what parameters were multiplied with, one of them element by element."""
    hidden = block.linear(x) * block.scale
    PLACES[block.place][0](block, hidden * block.scale)
    return block.last(hidden)


def storing(place: str) -> nn.Module:
    values = {"many": [], "named": {}, "router": Router(), "place": place}
    block = Parts(store, linear=linear(), scale=weight(W), last=linear(), **values)
    return Parts(lambda m, x: m.head(m.block(m.first(x))), first=linear(), block=block,
                 head=linear(W, 3))  # fmt: skip


def stored_loss(model: Any, x: torch.Tensor, _: int, with_output: bool = False) -> torch.Tensor:
    output = model(x)
    loss = sq(PLACES[model.block.place][1](model.block))
    return loss + sq(output) if with_output else loss


def forces_of(model: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An energy and its gradient, taken inside forward, which a loss differentiates once more."""
    with torch.enable_grad():
        positions = positions.detach().requires_grad_()
        energy = model.net(positions * model.scale).tanh().sum()
        (forces,) = torch.autograd.grad(energy, [positions], create_graph=model.training)
    return energy, forces * model.scale


def shard_energy(model: Any, **options: Any) -> nn.Module:
    for block in model.net.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def with_forces() -> nn.Module:
    return Parts(forces_of, net=Net(), scale=weight(W))
