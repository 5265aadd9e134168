"""Whatever modules return, and in which container, the gradients are those of the unsharded model.

Each model's blocks return something else; the oracle is the same model without ``fully_shard``.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, assert_same, average_gradients, own_input
from on_ranks import on_ranks
from torch import nn
from torch.utils._pytree import register_pytree_node

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

Tensors = tuple[torch.Tensor, torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Tensor], Any]
Unpack = Callable[[Any], Tensors]


# Containers -----------------------------------------------------------------------------------


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Plain:
    first: torch.Tensor
    second: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Derived:
    """Refuses to be made anew: its second field is not an argument."""

    first: torch.Tensor
    second: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Outer:
    inner: Frozen
    others: list[dict[str, torch.Tensor]]


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """An ordered dict and a dataclass at once, which keeps both in step."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    absent: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: torch.Tensor) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class Registered:
    """A container that only a registration makes known."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


register_pytree_node(
    Registered, lambda own: (list(own.tensors), None), lambda tensors, _: Registered(*tensors)
)


class CustomMapping(collections.UserDict[str, torch.Tensor]):
    pass


def derived(first: torch.Tensor, second: torch.Tensor) -> Derived:
    made = Derived(first)
    made.second = second
    return made


def attributes(value: Any) -> Tensors:
    return value.first, value.second


def items(value: Any) -> Tensors:
    return value["first"], value["second"]


def in_order(value: Any) -> Tensors:
    first, second = value
    return first, second


def second_items(value: Any) -> Tensors:
    (_, first), (_, second) = value
    return first, second


def both(value: Any) -> Tensors:
    """Take one from the items and one from the attributes: they must agree."""
    assert value["second"] is value.second and value.absent is None
    return value["first"], value.second


CONTAINERS: dict[str, tuple[Pack, Unpack]] = {
    "tuple": (lambda *tensors: tensors, in_order),
    "list": (lambda *tensors: list(tensors), in_order),
    "deque": (lambda *tensors: collections.deque(tensors), in_order),
    "dict": (lambda a, b: {"first": a, "second": b}, items),
    "ordered dict": (lambda a, b: collections.OrderedDict(first=a, second=b), items),
    "user dict": (lambda a, b: CustomMapping(first=a, second=b), items),
    "dict values": (lambda a, b: {"first": a, "second": b}.values(), in_order),
    "dict items": (lambda a, b: {"first": a, "second": b}.items(), second_items),
    "named tuple": (Named, attributes),
    "dataclass": (Plain, attributes),
    "frozen dataclass": (Frozen, attributes),
    "dataclass with slots": (Slots, attributes),
    "frozen dataclass with slots": (FrozenSlots, attributes),
    "dataclass with a derived field": (derived, attributes),
    "model output": (ModelOutput, both),
    "registered class": (Registered, lambda value: value.tensors),
    "return type of torch": (
        lambda a, b: torch.return_types.max((a, b)),
        in_order,
    ),
    "nested": (
        lambda a, b: [{"x": (Outer(Frozen(a, a * 0), [{"y": b}]), 3, None)}],
        lambda value: (value[0]["x"][0].inner.first, value[0]["x"][0].others[0]["y"]),
    ),
}


class Packing(nn.Module):
    """Returns two results in a container, and takes them in one."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.up = nn.Linear(4, 7)
        self.scale = nn.Parameter(torch.randn(7))
        self.down = nn.Linear(7, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, value: Any) -> Any:
        pack, unpack = CONTAINERS[self.container]
        first, second = unpack(value)
        self.seen = [first.dtype, second.dtype]
        hidden = torch.tanh(self.up(first)) * self.scale
        return pack(self.down(hidden), second + hidden.sum(1, keepdim=True))


class Chain(nn.Module):
    def __init__(self, container: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Packing(container) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        pack, _ = CONTAINERS[self.blocks[0].container]
        value = pack(x, x * 2)
        for block in self.blocks:
            value = block(value)
        return value


def loss_of(value: Any, container: str, which: tuple[int, ...]) -> torch.Tensor:
    tensors = CONTAINERS[container][1](value)
    return sum(tensors[index].float().square().sum() for index in which)


def train_chain(container: str, which: tuple[int, ...]) -> list[int]:
    torch.manual_seed(0)
    reference = Chain(container)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    counts = []
    for step in range(2):
        with record_events(model, "all_gather", "reduce_scatter") as recorded:
            loss = loss_of(model(own_input(step)), container, which)
            loss.backward()
        expected = loss_of(reference(own_input(step)), container, which)
        expected.backward()
        assert_same(loss, expected.detach())
        counts.append([event for event, _ in recorded].count("all_gather"))
        assert [event for event, _ in recorded].count("reduce_scatter") == 3
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return counts


@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_in_any_container(container: str) -> None:
    for which in ((0, 1), (0,), (1,)):
        # the last block stays for backward once the order is known
        assert run_ranks(train_chain, 2, container, which) == [[6, 5]] * 2


@pytest.mark.parametrize("container", CONTAINERS)
@on_ranks(2)
def test_inputs_and_outputs_are_cast_in_any_container(container: str) -> None:
    """Inputs and outputs are cast inside the container, whose class stays."""
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(Packing(container), mp_policy=policy)
    pack, unpack = CONTAINERS[container]
    value = pack(own_input(), own_input())
    before = unpack(value)
    output = model(value)
    assert model.seen == [torch.bfloat16] * 2
    assert type(output) is type(value)
    assert [tensor.dtype for tensor in unpack(output)] == [torch.float64] * 2
    assert all(new is old for new, old in zip(unpack(value), before, strict=True))


# Views that are changed in place ----------------------------------------------------------------


class Returning(nn.Module):
    """Applies a function to what its layers give."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(torch.tanh(self.inner(x)) * self.scale)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x


def part(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1:5]


def view_of_view(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)[2:].view(-1, 2)[1:]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().unsqueeze(0)


def add_(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def mul_part_(x: torch.Tensor) -> torch.Tensor:
    x[..., :1].mul_(3)
    return x


def negate_twice_(x: torch.Tensor) -> torch.Tensor:
    return x.neg_().add_(1).neg_()


def set_item(x: torch.Tensor) -> torch.Tensor:
    x[0] = 2.0
    return x


VIEWS = [whole, part, view_of_view, transposed]
CHANGES = [add_, mul_part_, negate_twice_, set_item]


class InPlace(nn.Module):
    """Changes the output of its block in place before the next one takes it."""

    def __init__(self, view: Callable[..., torch.Tensor], change: Callable[..., Any]) -> None:
        super().__init__()
        self.block = Returning(view)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.block(x))


def train_in_place(view: Any, change: Any, reshard: bool | None) -> None:
    torch.manual_seed(0)
    reference = InPlace(view, change)
    model = copy.deepcopy(reference)
    fully_shard(model.block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(2):
        for one in (model, reference):
            output = one(own_input(step))
            # and once more, on the output of the root
            change(output).square().sum().backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("view", VIEWS)
def test_in_place_on_a_view_output(view: Any, change: Any, reshard: bool) -> None:
    run_ranks(train_in_place, 2, view, change, reshard)


# No tensor inputs -------------------------------------------------------------------------------


class Generator(nn.Module):
    """Makes its output of its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, rows: int = 5, *, factor: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.table[:rows]) * self.scale * factor


class Generated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = Generator()
        self.twice = Generator()
        self.head = nn.Linear(4, 3)

    def forward(self, rows: int) -> torch.Tensor:
        prompt = self.source(rows) + self.twice(factor=2.0)[:rows] * self.twice()[:rows]
        return self.head(prompt)


def train_generated(reshard: bool | None) -> list[int]:
    torch.manual_seed(0)
    reference = Generated()
    model = copy.deepcopy(reference)
    for block in (model.source, model.twice):
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    counts = []
    for _ in range(2):
        rows = 2 + dist.get_rank()
        with record_events(model, "reduce_scatter") as recorded:
            model(rows).square().sum().backward()
        reference(rows).square().sum().backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
        counts.append(len(recorded))
    return counts


@pytest.mark.parametrize("reshard", [True, False, None])
def test_no_tensor_inputs(reshard: bool | None) -> None:
    assert run_ranks(partial(train_generated, reshard), 2) == [[3, 3]] * 2
