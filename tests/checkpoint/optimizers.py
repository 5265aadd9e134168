"""Optimizers whose states are saved and loaded: one or several, with one group or several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Make = Callable[[nn.Module], list[Optimizer]]


def one(kind: type[Optimizer], model: nn.Module, **kwargs: object) -> list[Optimizer]:
    return [kind(model.parameters(), **{"lr": 0.01, **kwargs})]


def by_dims(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]


def groups(model: nn.Module) -> list[Optimizer]:
    weights, others = by_dims(model)
    return [
        AdamW(
            [
                {"params": weights, "weight_decay": 0.1, "lr": torch.tensor(0.02)},
                {"params": others, "weight_decay": 0.0, "betas": (0.5, 0.6)},
            ],
            lr=0.01,
        )
    ]


def several(model: nn.Module) -> list[Optimizer]:
    weights, others = by_dims(model)
    trained = [p for p in weights if p.requires_grad]
    return [Adam(trained, lr=0.01, amsgrad=True), SGD(others, lr=0.02, momentum=0.9)]


INEXACT = {"adam-fused"}
"""Those whose last bits depend on the shape of the shard: vectors end elsewhere."""

OPTIMIZERS: dict[str, Make] = {
    "adam-foreach": partial(one, Adam, foreach=True),
    "adam-fused": partial(one, Adam, fused=True),
    "adamw-single": partial(one, AdamW, foreach=False),
    "sgd-momentum": partial(one, SGD, momentum=0.9),
    "sgd-without-state": partial(one, SGD),
    "groups": groups,
    "several": several,
}

FEW = {"groups", "several", "sgd-without-state"}
"""Of these each kind of state is one."""

names = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.matrix) for name in OPTIMIZERS
]
all_optimizers = pytest.mark.parametrize("make", names)
