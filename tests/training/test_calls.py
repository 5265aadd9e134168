"""Forwards and backwards in unusual numbers and orders give the gradients of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from training.scenarios import STACK_GROUPS, Block, Do, Scenario, Stack, assert_same, loss_of

Backward = Callable[..., None]


def once(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x))
    backward(loss)
    return loss


def forwards_before_one_backward(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    losses = [loss_of(model(x * scale)) for scale in (1, 2, 3)]
    backward(sum(losses))
    return losses


def backwards_in_order(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    losses = [loss_of(model(x * scale)) for scale in (1, 2)]
    for loss in losses:
        backward(loss)
    return losses


def backwards_in_reverse(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    losses = [loss_of(model(x * scale)) for scale in (1, 2)]
    for loss in reversed(losses):
        backward(loss)
    return losses


def a_forward_that_is_dropped(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    model(x * 5)
    return once(model, x, backward)


def the_graph_kept(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x))
    backward(loss, retain_graph=True)
    backward(loss)
    return loss


def parts_of_a_kept_graph(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    output = model(x)
    losses = [loss_of(output[:1]), loss_of(output[1:])]
    backward(losses[0], retain_graph=True)
    backward(losses[1])
    return losses


def evaluation_between(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x))
    with torch.no_grad():
        between = model(x * 2)
    backward(loss)
    return loss, between


def inference_between(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    with torch.inference_mode():
        before = model(x * 2).square()
    loss = loss_of(model(x))
    with torch.inference_mode():
        between = model(x * 3).square()
    backward(loss)
    return loss, before.clone(), between.clone()


def the_gradient_of_the_input_first(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    x.requires_grad_()
    loss = loss_of(model(x))
    (grad,) = torch.autograd.grad(loss, [x], retain_graph=True)
    backward(loss)
    assert x.grad is not None
    return loss, grad, x.grad


def with_a_penalty_on_the_output(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    output = model(x)
    loss = loss_of(output) + output.abs().sum() * 0.01
    backward(loss)
    return loss, output


RANKS = [(1, True), (2, True), (2, False), (3, True)]
"""How many ranks, and ``reshard_after_forward``."""

CALLS: list[Do] = [
    once,
    forwards_before_one_backward,
    backwards_in_order,
    backwards_in_reverse,
    a_forward_that_is_dropped,
    the_graph_kept,
    parts_of_a_kept_graph,
    evaluation_between,
    inference_between,
    the_gradient_of_the_input_first,
    with_a_penalty_on_the_output,
]


@pytest.mark.parametrize(("ranks", "reshard"), RANKS)
@pytest.mark.parametrize("do", CALLS, ids=lambda do: do.__name__)
def test_these_calls_give_the_gradients_of_the_oracle(do: Do, ranks: int, reshard: bool) -> None:
    options = {"reshard_after_forward": reshard}
    assert_same(Scenario(Stack, do, STACK_GROUPS, options), ranks)


def test_gradients_add_up_over_calls_without_zero_grad() -> None:
    for do in (once, forwards_before_one_backward, backwards_in_reverse, the_graph_kept):
        assert_same(Scenario(Stack, do, STACK_GROUPS, optimizes=False), 2)


# Modules that run several times, or not with the rest ---------------------------------------


def repeated() -> nn.Module:
    block = Block()
    return Stack([block, Block(), block])


@pytest.mark.parametrize(("ranks", "reshard"), RANKS)
@pytest.mark.parametrize("do", [once, forwards_before_one_backward, the_graph_kept])
def test_a_module_that_runs_twice_has_one_gradient(do: Do, ranks: int, reshard: bool) -> None:
    options = {"reshard_after_forward": reshard}
    assert_same(Scenario(repeated, do, ("blocks.0", "blocks.1", ""), options), ranks)


class TwoParts(nn.Module):
    """An encoder that is also called by itself, and a head called on chunks of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack([Block()])
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, part: str = "all") -> torch.Tensor:
        if part == "head":
            return self.head(x)
        x = self.encoder(x)
        return x if part == "encoder" else self.head(x)


def encoder_alone_first(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    encoded = loss_of(model(x, "encoder"))
    whole = loss_of(model(x * 2))
    backward(encoded + whole)
    return encoded, whole


def encoder_alone(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    encoded = loss_of(model(x, "encoder"))
    backward(encoded)
    return encoded


def head_by_chunks(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    """The head's loss by chunks, each with its backward, and then the encoder's."""
    encoded = model(x, "encoder")
    features = encoded.detach().requires_grad_()
    losses = [loss_of(model(chunk, "head")) for chunk in features.split(1)]
    for loss in losses:
        backward(loss)
    assert features.grad is not None
    backward((encoded * features.grad).sum())
    return losses


def first_this_then_that(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    encoded = model(x, "encoder")
    loss = loss_of(model(encoded, "head"))
    backward(loss)
    return loss


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "do", [encoder_alone_first, encoder_alone, head_by_chunks, first_this_then_that]
)
def test_parts_of_a_model_may_run_by_themselves(do: Do, ranks: int) -> None:
    groups = ("encoder.blocks.0", "encoder", "head", "")
    assert_same(Scenario(TwoParts, do, groups), ranks)


# Losses that do not come from the output ----------------------------------------------------


class Caching(nn.Module):
    """Keeps an inner activation for a loss of its own; ``output`` alone is its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.outer = Block()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.inner(x)
        self.kept = kept * 2
        return self.outer(kept)


def kept_of(model: Any) -> torch.Tensor:
    kept = getattr(model, "model", model).kept
    assert isinstance(kept, torch.Tensor)
    return kept


def loss_on_the_kept(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    model(x)
    loss = loss_of(kept_of(model))
    backward(loss)
    return loss


def loss_on_both(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x)) + loss_of(kept_of(model))
    backward(loss)
    return loss


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("do", [loss_on_the_kept, loss_on_both])
@pytest.mark.parametrize("groups", [("inner", "outer", ""), ("",)], ids=["nested", "root"])
def test_a_loss_may_come_from_what_the_module_kept(
    groups: tuple[str, ...], do: Do, ranks: int, reshard: bool
) -> None:
    assert_same(Scenario(Caching, do, groups, {"reshard_after_forward": reshard}), ranks)
