"""Containers that go in and out of modules: tensors are watched and cast, the kind stays."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, average_gradients, own_input
from on_ranks import on_ranks
from support.simulated_device import SimulatedDevice
from torch import nn
from torch.utils._pytree import register_pytree_node

from composable_shard import MixedPrecisionPolicy, ShardError, fully_shard
from composable_shard.compat.fsdp1 import FullyShardedDataParallel, MixedPrecision
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks
from training.models import Case, Cases, Parts, W, check, linear, sq, weight
from training.trees import WIDTH, inputs_for

BF16 = torch.bfloat16
Tensors = tuple[torch.Tensor, torch.Tensor]


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def of_two(name: str, **options: Any) -> Any:
    fields = [("first", torch.Tensor), ("second", torch.Tensor)]
    return dataclasses.make_dataclass(name, fields, **options)


Plain, Frozen, Slots = of_two("Plain"), of_two("Frozen", frozen=True), of_two("Slots", slots=True)
FrozenSlots = of_two("FrozenSlots", frozen=True, slots=True)


@dataclasses.dataclass
class Derived:
    """Refuses to be made anew: its second field is not an argument."""

    first: torch.Tensor
    second: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Outer:
    inner: Any
    others: list[dict[str, torch.Tensor]]
    note: str = "kept"


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
    """A container that only a registration makes known, by lists that are made for it."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


register_pytree_node(
    Registered, lambda own: ([list(own.tensors)], None), lambda lists, _: Registered(*lists[0])
)


class Mapped(collections.UserDict[str, torch.Tensor]):
    """A mapping of a user's own."""


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


def both(value: Any) -> Tensors:
    """Take one from the items and one from the attributes: they must agree."""
    assert value["second"] is value.second and value.absent is None
    return value["first"], value.second


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensors]]] = {
    "tuple": (lambda *tensors: tensors, in_order),
    "list": (lambda *tensors: list(tensors), in_order),
    "deque": (lambda *tensors: collections.deque(tensors), in_order),
    "dict": (lambda a, b: {"first": a, "second": b}, items),
    "ordered dict": (lambda a, b: collections.OrderedDict(first=a, second=b), items),
    "user dict": (lambda a, b: Mapped(first=a, second=b), items),
    "dict values": (lambda a, b: {"first": a, "second": b}.values(), in_order),
    "dict items": (
        lambda a, b: {"first": a, "second": b}.items(),
        lambda value: in_order(tensor for _, tensor in value),
    ),
    "named tuple": (Named, attributes),
    "dataclass": (Plain, attributes),
    "frozen dataclass": (Frozen, attributes),
    "dataclass with slots": (Slots, attributes),
    "frozen dataclass with slots": (FrozenSlots, attributes),
    "dataclass with a derived field": (derived, attributes),
    "model output": (ModelOutput, both),
    "registered class": (Registered, lambda value: value.tensors),
    "return type of torch": (lambda a, b: torch.return_types.max((a, b)), in_order),
    "nested": (
        lambda a, b: [{"x": (Outer(Frozen(a, a * 0), [{"y": b}]), 3, None)}],
        lambda value: (value[0]["x"][0].inner.first, value[0]["x"][0].others[0]["y"]),
    ),
}


def packing(container: str) -> Parts:
    pack, unpack = CONTAINERS[container]

    def run(block: Any, value: Any) -> Any:
        first, second = unpack(value)
        block.seen = [first.dtype, second.dtype]
        hidden = torch.tanh(block.up(first)) * block.scale
        return pack(block.down(hidden), second + hidden.sum(1, keepdim=True))

    return Parts(run, up=linear(4, 7), scale=weight(7), down=linear(7, 4))


def chain(container: str) -> nn.Module:
    def run(model: Any, x: torch.Tensor) -> Any:
        value = CONTAINERS[container][0](x, x * 2)
        for block in model.blocks:
            value = block(value)
        return value

    return Parts(run, blocks=nn.ModuleList(packing(container) for _ in range(3)))


def loss_of_some(container: str, which: str, model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    found = CONTAINERS[container][1](model(x))
    return sum((sq(found[int(index)]) for index in which), torch.zeros(()))


RETURNED: Cases = {
    f"{container} {which}": Case(partial(chain, container), partial(loss_of_some, container, which))
    for container in CONTAINERS
    for which in ("01", "0", "1")
}


@pytest.mark.parametrize("which", ["01", "0", "1"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_in_any_container(container: str, which: str) -> None:
    check(__name__, "RETURNED", f"{container} {which}", program=["backward", "step", "backward"])


@on_ranks(2)
def test_inputs_and_outputs_are_cast_in_any_container() -> None:
    """Inputs and outputs are cast inside the container, whose class stays."""
    policy = MixedPrecisionPolicy(BF16, output_dtype=torch.float64)
    for container, (pack, unpack) in CONTAINERS.items():
        model = fully_shard(packing(container), mp_policy=policy)
        value = pack(own_input(), own_input())
        before = unpack(value)
        output = model(value)
        assert model.seen == [BF16] * 2, container
        assert type(output) is type(value)
        assert [tensor.dtype for tensor in unpack(output)] == [torch.float64] * 2, container
        assert all(new is old for new, old in zip(unpack(value), before, strict=True)), container


def test_inputs_in_a_container_are_cast_where_they_are_moved_to_a_device_too() -> None:
    with fake_ranks(2), SimulatedDevice():
        model = fully_shard(packing("list"), mp_policy=MixedPrecisionPolicy(BF16))
        model([torch.ones(3, 4), torch.ones(3, 4)])
    assert model.seen == [BF16] * 2


# Containers that forward changes ------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    seen: Any = None
    made: Any = None


def into_list(kept: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return sum(kept[:-1], x)


def into_dict(kept: Any, x: torch.Tensor) -> torch.Tensor:
    kept["sum"] = kept["sum"] + x if "sum" in kept else x
    return kept["sum"]


def into_set(kept: set[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    before = list(kept)
    kept.clear()
    kept.add(x)
    return sum(before, x)


def into_record(kept: Record, x: torch.Tensor) -> torch.Tensor:
    before = kept.made if kept.seen is None else kept.seen
    kept.seen = x
    kept.note = x  # type: ignore[attr-defined] (an attribute that is no field)
    return x if before is None else x * before


def into_nested(kept: list[Any], x: torch.Tensor) -> torch.Tensor:
    kept[0]["by depth"][0].append(x)
    return sum(kept[0]["by depth"][0][:-1], x)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "list": (list, into_list, "list"),
    "dict": (dict, into_dict, "dict"),
    "mapping": (Mapped, into_dict, "Mapped"),
    "set": (set, into_set, "set"),
    "dataclass": (Record, into_record, "Record"),
    "nested": (lambda: [{"by depth": ([],)}], into_nested, "list"),
}


def keeping(kind: str) -> nn.Module:
    def run(model: Any, x: torch.Tensor, kept: Any) -> torch.Tensor:
        return model.down(torch.tanh(KINDS[kind][1](kept, model.up(x.to(model.up.weight.dtype)))))

    return Parts(run, up=linear(4, 5), down=linear(5, 4)).double()


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, collections.UserDict)):
        return [tensor for key in sorted(value) for tensor in tensors_of(value[key])]
    if isinstance(value, Record):
        return tensors_of(dict(sorted(value.__dict__.items())))
    return [tensor for item in value or () for tensor in tensors_of(item)]


def kept_loss(kind: str, reached: str, model: Any, x: torch.Tensor, _: int) -> torch.Tensor:
    kept = KINDS[kind][0]()
    output = model(x, kept)
    of_kept = [sq(tensor) for tensor in tensors_of(kept)]
    assert len(of_kept) == (2 if kind == "dataclass" else 1)
    losses = [sq(output)] * ("output" in reached) + of_kept * ("kept" in reached)
    return sum(losses, torch.zeros(()))


REACHED = ["output", "output and kept", "kept"]
CHANGED: Cases = {
    f"{kind}: {reached}": Case(
        partial(keeping, kind),
        partial(kept_loss, kind, reached),
        {"shard": fully_shard, "tolerance": 1e-12},
    )
    for kind in KINDS
    for reached in REACHED
}


@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_forward_puts_into_a_container_is_there_for_the_caller(
    kind: str, reached: str
) -> None:
    check(__name__, "CHANGED", f"{kind}: {reached}", program=["backward", "backward"])


def refusal(where: str, what: str) -> str:
    text = (
        f"Expected forward of {where} not to change a {what}, got a change of its copy with cast "
        "or hooked tensors; return or store the new values"
    )
    return f"^{re.escape(text)}$"


def assert_goes_on(model: nn.Module, reference: nn.Module, *inputs: Callable[[], Any]) -> None:
    for net in (reference, model):
        sq(net(*(make() for make in inputs))).backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)


@on_ranks(2)
def test_a_change_of_a_copy_is_refused() -> None:
    """The second call gets what the first has put there, which needs a gradient."""
    for kind, (make, _, name) in KINDS.items():
        reference = keeping(kind)
        model = fully_shard(copy.deepcopy(reference))
        kept = make()
        loss = model(own_input(), kept).sum()
        with pytest.raises(ShardError, match=refusal("the root group", name)):
            model(own_input(), kept)
        del loss
        assert_goes_on(model, reference, own_input, make)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("kind", ["list", "mapping"])
@on_ranks(2)
def test_a_change_of_what_is_cast_is_refused(kind: str, wraps: bool) -> None:
    model = keeping(kind).float()
    if wraps:
        model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(BF16))
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16))
    given = torch.full((3, 5), 0.1)
    kept: Any = [given] if kind == "list" else {"given": given}
    where = "FSDPParts" if wraps else "the root group"
    with torch.no_grad(), pytest.raises(ShardError, match=refusal(where, type(kept).__name__)):
        model(own_input(), kept)
    assert tensors_of(kept) == [given]


def test_a_container_that_contains_itself_is_refused() -> None:
    text = "Expected no container that contains itself, got a list; pass its items separately"
    items: list[Any] = [torch.ones(2, W, requires_grad=True)]
    items.append(items)
    with fake_ranks(2):
        model = fully_shard(Parts(lambda model, given: model.linear(given[0]), linear=linear()))
        with pytest.raises(ShardError, match=f"^{re.escape(text)}$"):
            model(items)


# Inputs and parameters that are returned, and views of them ---------------------------------------


PASSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda position: position,
    "view": lambda position: position[:2],
    "written": lambda position: position.mul_(2),
}


class Layer(nn.Module):
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
