"""Whatever modules take, gradients reach their parameters as in the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from training.scenarios import Do, Scenario, assert_same, loss_of
from training.trees import WIDTH

Backward = Callable[..., None]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Record:
    value: torch.Tensor
    rest: Any = None


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Taking(nn.Module):
    """Takes inputs of several kinds, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TakingBlock()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.block(*args, **kwargs) * self.weight


class TakingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(
        self,
        x: Any = None,
        *,
        ids: torch.Tensor | None = None,
        nested: dict[str, list[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        total = self.scale.square()
        if isinstance(x, Record):
            x = x.value
        if x is not None:
            total = total * x
        if ids is not None:
            total = total + self.weight[ids]
        if nested is not None:
            total = total + sum(nested["terms"]) * self.scale
        return total


def nothing(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model())
    backward(loss)
    return loss


def by_name(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x=x, nested={"terms": [x, x * 2]}))
    backward(loss)
    return loss


def integers_alone(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(ids=torch.arange(3)))
    backward(loss)
    return loss


def with_gradients(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    x.requires_grad_()
    loss = loss_of(model(x))
    backward(loss)
    assert x.grad is not None
    return loss, x.grad


def nested_with_gradients(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    x.requires_grad_()
    y = x.detach().clone().requires_grad_()
    loss = loss_of(model(Record(x), nested={"terms": [y, x, y]}))
    backward(loss)
    assert x.grad is not None and y.grad is not None
    return loss, x.grad, y.grad


def one_input_twice(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    x.requires_grad_()
    x2 = x * 2
    loss = loss_of(model(x2, nested={"terms": [x2]}) + x2)
    backward(loss)
    assert x.grad is not None
    return loss, x.grad


INPUTS: list[Do] = [
    nothing,
    by_name,
    integers_alone,
    with_gradients,
    nested_with_gradients,
    one_input_twice,
]


@pytest.mark.parametrize(("ranks", "reshard"), [(1, True), (2, False), (3, True)])
@pytest.mark.parametrize("do", INPUTS, ids=lambda do: do.__name__)
def test_any_inputs_give_the_gradients_of_the_oracle(do: Do, ranks: int, reshard: bool) -> None:
    options = {"reshard_after_forward": reshard}
    assert_same(Scenario(Taking, do, ("block", ""), options), ranks)
