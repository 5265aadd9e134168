"""Forwards without gradients: nothing grows."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Net, own_input, train_step, two_nets
from torch import nn

from composable_shard.testing import run_ranks

CONTAINERS = (list, dict, set, collections.deque, tuple)


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the length of every container that the library or autograd hangs on a model."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if id(value) in seen or isinstance(value, torch.Tensor):
            return
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            sizes[path] = len(value)
            children = value.values() if isinstance(value, dict) else value
            for index, child in enumerate(list(children)):
                visit(child, f"{path}[{index}]")
        elif type(value).__module__.startswith("composable_shard"):
            names = [n for kind in type(value).__mro__ for n in kind.__dict__.get("__slots__", ())]
            for name in [*vars(value), *names] if hasattr(value, "__dict__") else names:
                visit(getattr(value, name), f"{path}.{name}")

    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            visit(value, f"{name}.{attribute}")
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                visit(getattr(hook, "__self__", None), f"{name} {hook}")
    for name, param in model.named_parameters():
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            sizes[f"{name}.{hooks}"] = len(getattr(param, hooks) or ())
    return sizes


class Storing(Net):
    """Keeps something of every forward, and calls a block twice."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        self.kept = x
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def growth(context: Callable[[], Any], reshard: bool | None, trains: bool) -> dict[str, Any]:
    _, model = two_nets(2, make=Storing, reshard_after_forward=reshard)
    if trains:
        train_step(model, 0, None)
    counts = []
    for num_forwards in (3, 50):
        for step in range(num_forwards):
            with context():
                model(own_input(step))
        counts.append(sizes_of(model))
    assert len(counts[0]) > 60  # it did find them
    return {path: (size, counts[1].get(path)) for path, size in counts[0].items()} | {
        path: (counts[0].get(path), size) for path, size in counts[1].items()
    }


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_grad_forwards_grow_nothing(context: Callable[[], Any], reshard: bool | None) -> None:
    """Neither do forwards with gradients whose results are dropped."""
    for trains in (False, True):
        for sizes in run_ranks(growth, 2, context, reshard, trains):
            assert {path: pair for path, pair in sizes.items() if pair[0] != pair[1]} == {}
