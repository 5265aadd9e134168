"""What forward puts into containers that it is given is there for the caller, or refused."""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import assert_parity, average_gradients, both, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.compat.fsdp1 import FullyShardedDataParallel, MixedPrecision
from composable_shard.errors import ShardError

BF16 = torch.bfloat16


@dataclasses.dataclass
class Record:
    seen: Any = None
    made: Any = None


class Mapped(collections.UserDict[str, torch.Tensor]):
    """A mapping of a user's own."""


Keep = Callable[[Any, torch.Tensor], torch.Tensor]


def into_list(kept: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return sum(kept[:-1], x)


def into_dict(kept: Any, x: torch.Tensor) -> torch.Tensor:
    kept["sum"] = kept["sum"] + x if "sum" in kept else x
    return kept["sum"]


def moved_in_dict(kept: Any, x: torch.Tensor) -> torch.Tensor:
    """Add one, and give another one a new name."""
    kept["last"] = kept.pop("new") if "new" in kept else x * 2
    kept["new"] = x
    return kept["last"] * x


def into_deque(kept: collections.deque[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return sum(kept, torch.zeros(()))


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


KINDS: dict[str, tuple[Callable[[], Any], Keep]] = {
    "list": (list, into_list),
    "dict": (dict, into_dict),
    "dict, moved": (dict, moved_in_dict),
    "ordered dict": (collections.OrderedDict, into_dict),
    "mapping": (Mapped, into_dict),
    "deque": (lambda: collections.deque(maxlen=2), into_deque),
    "set": (set, into_set),
    "dataclass": (Record, into_record),
    "nested": (lambda: [{"by depth": ([],)}], into_nested),
}


class Keeping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)
        self.keep = KINDS[kind][1]

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        return self.down(torch.tanh(self.keep(kept, self.up(x))))


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, collections.UserDict)):
        return [tensor for key in sorted(value) for tensor in tensors_of(value[key])]
    if isinstance(value, Record):
        return tensors_of(dict(sorted(value.__dict__.items())))
    return [tensor for item in value or () for tensor in tensors_of(item)]


@pytest.mark.parametrize("reached", ["output", "output and kept", "kept"])
@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_what_forward_puts_into_a_container_is_there_for_the_caller(
    kind: str, reached: str
) -> None:
    reference = Keeping(kind).double()
    model = fully_shard(copy.deepcopy(reference))
    for step in range(2):
        all_kept = []
        for net in (reference, model):
            kept = KINDS[kind][0]()
            output = net(own_input(step).double(), kept)
            all_kept.append(tensors_of(kept))
            loss = output.square().sum() if "output" in reached else torch.zeros(())
            if "kept" in reached:
                loss = loss + sum(tensor.square().sum() for tensor in all_kept[-1])
            loss.backward()
        average_gradients(reference.parameters())
        torch.testing.assert_close(*all_kept, rtol=1e-12, atol=1e-12)
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(*both(param.grad, expected.grad), rtol=1e-12, atol=1e-12)
        for net in (reference, model):
            net.zero_grad()


def refusal(where: str, what: str) -> str:
    return (
        f"Expected forward of {where} not to change a {what} whose tensors were cast or need "
        "gradients, of which it gets a copy, got it changed; return what it is to hold, or store "
        "that on the module"
    )


TYPES = {
    "ordered dict": "OrderedDict",
    "mapping": "Mapped",
    "dataclass": "Record",
    "nested": "list",
    "dict, moved": "dict",
}


@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_a_change_of_a_copy_is_refused(kind: str) -> None:
    """The second call gets what the first has put there, which needs a gradient."""
    reference = Keeping(kind)
    model = fully_shard(copy.deepcopy(reference))
    kept = KINDS[kind][0]()
    loss = model(own_input(), kept).sum()
    expected = refusal("the root group", TYPES.get(kind, kind))
    with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
        model(own_input(), kept)
    del loss
    for net in (reference, model):  # and goes on
        net(own_input(), KINDS[kind][0]()).sum().backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("kind", ["list", "mapping"])
@on_ranks(2)
def test_a_change_of_what_is_cast_is_refused(kind: str, wraps: bool) -> None:
    if wraps:
        model = FullyShardedDataParallel(Keeping(kind), mixed_precision=MixedPrecision(BF16))
    else:
        model = fully_shard(Keeping(kind), mp_policy=MixedPrecisionPolicy(BF16))
    given = torch.full((3, 5), 0.1)
    kept: Any = [given] if kind == "list" else {"given": given}
    expected = refusal("FSDPKeeping" if wraps else "the root group", type(kept).__name__)
    with torch.no_grad(), pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
        model(own_input(), kept)
    assert tensors_of(kept) == [given]


class Passing(nn.Module):
    """Reads a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, kept: list[Any], *, again: dict[str, Any]) -> torch.Tensor:
        assert again["kept"] is kept
        return self.layer(kept[0])


@on_ranks(2)
def test_a_container_in_two_places_stays_one() -> None:
    reference = Passing()
    model = fully_shard(copy.deepcopy(reference))
    for net in (reference, model):
        kept = [own_input().requires_grad_()]
        net(kept, again={"kept": kept}).square().sum().backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
