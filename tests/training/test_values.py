"""Whatever modules take and return, gradients reach their parameters as in the oracle."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from composable_shard import MixedPrecisionPolicy
from training.scenarios import Block, Do, Scenario, assert_same, loss_of
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


class Wrapping(nn.Module):
    """Returns what its block computes, wrapped in some way."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.block(x))


class Outer(nn.Module):
    """Calls a wrapping module, reads the tensors out of what it returns, and goes on."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = Wrapping(wrap)
        self.last = Block()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.read(self.inner(x)))


def as_list(x: torch.Tensor) -> Any:
    return [x, None, "text", 3]


def as_nested(x: torch.Tensor) -> Any:
    return {"a": [x * 2, (x, {"b": x + 1})], "n": 1}


def as_named_tuple(x: torch.Tensor) -> Any:
    return Pair(x, x.sin())


def as_dataclass(x: torch.Tensor) -> Any:
    return Record(x, Frozen(x * 3))


def as_ordered(x: torch.Tensor) -> Any:
    return OrderedDict(first=x, second=x.cos())


def as_dict_values(x: torch.Tensor) -> Any:
    return {"a": x, "b": x.cos()}.values()


def as_dict_items(x: torch.Tensor) -> Any:
    return {"a": x, "b": x.cos()}.items()


def as_views(x: torch.Tensor) -> Any:
    return x[:1], x[1:], x.view(-1)


def read_list(out: Any) -> torch.Tensor:
    assert out[1:] == [None, "text", 3]
    return out[0]


def read_nested(out: Any) -> torch.Tensor:
    first, (second, inner) = out["a"]
    return first + second + inner["b"]


def read_named_tuple(out: Any) -> torch.Tensor:
    assert type(out) is Pair
    return out.first + out.second


def read_dataclass(out: Any) -> torch.Tensor:
    assert type(out) is Record and type(out.rest) is Frozen
    return out.value + out.rest.value


def read_ordered(out: Any) -> torch.Tensor:
    assert type(out) is OrderedDict
    return out["first"] * out["second"]


def read_values(out: Any) -> torch.Tensor:
    first, second = out
    return first * second


def read_items(out: Any) -> torch.Tensor:
    (_, first), (_, second) = out
    return first * second


def read_views(out: Any) -> torch.Tensor:
    first, second, flat = out
    return torch.cat([first, second]) * flat.view(-1, WIDTH)


def read_views_in_place(out: Any) -> torch.Tensor:
    _, _, flat = out
    flat.mul_(2)
    flat.view(-1, WIDTH)[0].add_(1)
    return flat.view(-1, WIDTH)


WRAPPINGS = [
    (as_list, read_list),
    (as_nested, read_nested),
    (as_named_tuple, read_named_tuple),
    (as_dataclass, read_dataclass),
    (as_ordered, read_ordered),
    (as_dict_values, read_values),
    (as_dict_items, read_items),
    (as_views, read_views),
    (as_views, read_views_in_place),
]


def once(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x))
    backward(loss)
    return loss


@dataclass(frozen=True)
class MakeOuter:
    wrap: Callable[[torch.Tensor], Any]
    read: Callable[[Any], Any]

    def __call__(self) -> nn.Module:
        return Outer(self.wrap, self.read)


@pytest.mark.parametrize(("wrap", "read"), WRAPPINGS)
def test_gradients_flow_out_of_any_output(
    wrap: Callable[[torch.Tensor], Any], read: Callable[[Any], Any]
) -> None:
    assert_same(Scenario(MakeOuter(wrap, read), once, ("inner", "last", "")), 2)
    assert_same(Scenario(MakeOuter(wrap, read), once, ("inner.block", "inner", "")), 3)


@pytest.mark.parametrize("wrap, read", WRAPPINGS[:5])
def test_outputs_are_cast_wherever_they_are(
    wrap: Callable[[torch.Tensor], Any], read: Callable[[Any], Any]
) -> None:
    policy = MixedPrecisionPolicy(output_dtype=torch.float64, cast_forward_inputs=False)
    make = MakeOuter(wrap, read)
    assert_same(Scenario(make, once_in_float64, ("",), {"mp_policy": policy}), 2)


def once_in_float64(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    output = model(x)
    assert output.dtype == torch.float64
    loss = loss_of(output)
    backward(loss)
    return output


# Inputs -------------------------------------------------------------------------------------


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
