"""Hooks that let a forward or a backward fail at one place, and iterations that do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from nets import Net, assert_parity, own_input, train_step, two_nets
from torch import nn


class Failure(Exception):
    """What fails."""


class Interrupt(BaseException):
    """What fails and is not an ``Exception``, as an interrupt from the keyboard."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ctx.error("in backward")


def fail(error: type[BaseException], *_: object) -> None:
    raise error("in forward")


def fail_backward(error: type[BaseException], module: nn.Module, args: Any, output: Any) -> Any:
    return FailInBackward.apply(output, error)


@dataclass(frozen=True)
class Break:
    """Registers a hook that fails, in backward when it reaches the output; returns its handle."""

    module: str
    when: Literal["before", "after", "backward"]

    def __call__(self, model: Net, error: type[BaseException]) -> Any:
        module = model.get_submodule(self.module)
        if self.when == "before":
            return module.register_forward_pre_hook(partial(fail, error))
        hook = fail if self.when == "after" else fail_backward
        return module.register_forward_hook(partial(hook, error))

    def __str__(self) -> str:
        return f"{self.when} {self.module or 'root'}"


before_root, after_root = Break("", "before"), Break("", "after")
before_block, after_block = Break("blocks.0", "before"), Break("blocks.0", "after")
within_block, in_first_layer = Break("blocks.1.up", "after"), Break("inp", "after")
FORWARD = [before_root, in_first_layer, before_block, within_block, after_block, after_root]

below_head, within_second = Break("blocks.1", "backward"), Break("blocks.1.up", "backward")
between_blocks, at_the_bottom = Break("blocks.0", "backward"), Break("inp", "backward")
BACKWARD = [below_head, within_second, between_blocks, at_the_bottom]


def failing_step(model: Net, step: int, break_at: Break, error: type[BaseException]) -> None:
    handle = break_at(model, error)
    with pytest.raises(error):
        model(own_input(step)).square().sum().backward()
    handle.remove()


def train_with_failure(break_at: Break, error: type[BaseException], fail_in: int) -> None:
    reference, model = two_nets(2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(4):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            if step == fail_in:
                if one is model:
                    failing_step(model, step, break_at, error)
                continue
            train_step(one, step, None)
            optimizer.step()
    assert_parity(model, reference)
