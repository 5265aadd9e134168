"""Modules that return an input, a view of one, or a view of a parameter."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, average_gradients
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from training.trees import WIDTH, inputs_for

PASSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda position: position,
    "view": lambda position: position[:2],
    "written": lambda position: position.mul_(2),
}


class Layer(nn.Module):
    """Returns its position beside its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.passed = nn.Linear(WIDTH, WIDTH), PASSED[kind]

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x) + position.mean(0)), self.passed(position)


class Layers(nn.Module):
    """Adds what it has passed through its layers to their output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        self.position = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = self.position * 2
        for layer in self.layers:
            x, position = layer(x, position)
        return x.sum() * position.square().sum()


class Mark:
    """Lives as long as the node of autograd that it hangs on."""


def note(marks: list[weakref.ref[Mark]], module: Any, args: Any) -> None:
    mark = args[1].grad_fn.metadata["mark"] = Mark()
    marks.append(weakref.ref(mark))


@pytest.mark.parametrize("kind", PASSED)
@on_ranks(2)
def test_what_is_passed_through_is_right_and_let_go(kind: str) -> None:
    torch.manual_seed(0)
    plain = Layers(kind)
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(2):
        marks: list[weakref.ref[Mark]] = []
        handles = [layer.register_forward_pre_hook(partial(note, marks)) for layer in model.layers]
        with record_events(model, "all_gather") as events:
            for one in (model, plain):
                one(inputs_for(step, dist.get_rank())).backward()
        for handle in handles:
            handle.remove()
        assert len(events) == 7, events  # of three layers twice, of the root once
        average_gradients(plain.parameters())
        assert_parity(model, plain)
        gc.collect()
        assert [mark() for mark in marks] == [None] * 3
        model.zero_grad()
        plain.zero_grad()
