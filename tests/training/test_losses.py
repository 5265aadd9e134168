"""A loss may be computed of what forward put somewhere, and not of what it returned."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import assert_parity, assert_same, average_gradients, own_input, train_step
from on_ranks import on_ranks
from torch import nn

from composable_shard import ShardError, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

ELSEWHERE: list[torch.Tensor] = []


class Router:
    """A plain object; with slots, and another object inside."""

    __slots__ = ("inner", "name")

    def __init__(self) -> None:
        self.name = "router"
        self.inner = SimpleNamespace(by_layer={}, config=SimpleNamespace(width=4))


Store = Callable[[Any, torch.Tensor], None]
Load = Callable[[Any], torch.Tensor]


def in_object(module: Any, value: torch.Tensor) -> None:
    module.router.inner.by_layer["last"] = [value]


PLACES: dict[str, tuple[Store, Load]] = {
    "attribute": (
        lambda module, value: setattr(module, "kept", value),
        lambda module: module.kept,
    ),
    "list": (
        lambda module, value: module.many.append(value),
        lambda module: module.many.pop(),
    ),
    "dict": (
        lambda module, value: module.named.update(last={"loss": value}),
        lambda module: module.named["last"]["loss"],
    ),
    "object": (in_object, lambda module: module.router.inner.by_layer["last"][0]),
    "elsewhere": (
        lambda module, value: ELSEWHERE.append(value),
        lambda module: ELSEWHERE.pop(),
    ),
}


class Storing(nn.Module):
    """Stores what its parameters were multiplied with, one of them element by element."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.last = nn.Linear(4, 4)
        self.place = place
        self.many: list[torch.Tensor] = []
        self.named: dict[str, Any] = {}
        self.router = Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) * self.scale
        PLACES[self.place][0](self, hidden * self.scale)
        return self.last(hidden)


class Model(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = Storing(place)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.first(x)))


def sharded_pair(place: str, reshard: bool | None) -> tuple[Model, Model]:
    torch.manual_seed(0)
    reference = Model(place)
    model = copy.deepcopy(reference)
    for module in (model.first, model.block, model):
        fully_shard(module, reshard_after_forward=reshard)
    return reference, model


def loss_of(model: Model, step: int, with_output: bool) -> torch.Tensor:
    output = model(own_input(step))
    loss = PLACES[model.block.place][1](model.block).square().sum()
    return loss + output.square().sum() if with_output else loss


def train(place: str, with_output: bool, reshard: bool | None) -> list[int]:
    reference, model = sharded_pair(place, reshard)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, reference)]
    counts = []
    for step in range(3):
        with record_events(model, "reduce_scatter") as recorded:
            loss = loss_of(model, step, with_output)
            loss.backward()
        expected = loss_of(reference, step, with_output)
        expected.backward()
        assert_same(loss, expected.detach())
        average_gradients(reference.parameters())
        if not with_output:  # the head takes its turn, with zeros of which nobody has any
            assert reference.head.weight.grad is None
        assert_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(recorded))
    return counts


@pytest.mark.parametrize("reshard", [True, None, False])
@pytest.mark.parametrize("place", [name for name in PLACES if name != "elsewhere"])
def test_loss_on_a_cached_intermediate(place: str, reshard: bool | None) -> None:
    for with_output in (False, True):
        assert run_ranks(train, 2, place, with_output, reshard) == [[3, 3, 3]] * 2


@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize(("ranks", "reshard"), [(2, False), (1, True), (1, None)])
def test_loss_on_an_intermediate_kept_elsewhere_while_parameters_stay(
    ranks: int, reshard: bool | None, with_output: bool
) -> None:
    run_ranks(train, ranks, "elsewhere", with_output, reshard)


FREED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: [torch.FloatTensor [4]] is at version N; expected version 1 instead. "
    "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True, check_nan=False)."
)


def refuse_freed(reshard: bool | None) -> list[str]:
    """The process lives on, and the next iteration is as if this one had not been."""
    reference, model = sharded_pair("elsewhere", reshard)
    texts = []
    for step in range(4):
        if step in (0, 2):
            model(own_input(step))
            with pytest.raises(RuntimeError) as caught:
                ELSEWHERE.pop().square().sum().backward()
            texts.append(re.sub(r"at version \d+", "at version N", str(caught.value)))
        else:
            train_step(model, step, None)
            train_step(reference, step, None)
            ELSEWHERE.clear()
            assert_parity(model, reference)
            model.zero_grad()
            reference.zero_grad()
    # What the backward needs may be gathered by hand.
    loss, expected = loss_of(model, 4, False), loss_of(reference, 4, False)
    for module in (model, model.block, model.first):
        module.unshard()
    loss.backward()
    expected.backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
    return texts


@pytest.mark.parametrize("reshard", [True, None])
def test_loss_on_an_intermediate_kept_elsewhere_is_refused_once_parameters_are_freed(
    reshard: bool | None,
) -> None:
    assert run_ranks(refuse_freed, 2, reshard) == [[FREED] * 2] * 2


@on_ranks(2)
def test_a_parameter_that_forward_changes_in_place_is_refused() -> None:
    """Forward may not change it, freed in between or not; nor may who comes after it."""
    for reshard in (True, False):
        _, model = sharded_pair("attribute", reshard)

        def change(module: Any, args: Any, output: Any) -> None:
            with torch.no_grad():
                module.scale.mul_(2)

        handle = model.block.register_forward_hook(change, prepend=True)
        with pytest.raises(ShardError, match="'scale' written in place"):
            loss_of(model, 0, True)
        handle.remove()
    loss = loss_of(model, 0, True)
    change(model.block, None, None)
    with pytest.raises(ShardError, match="got 'scale' written, which is lost"):
        loss.backward()
