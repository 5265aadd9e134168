"""What forward puts into containers that it is given, or takes out, is there for the caller."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import assert_parity, average_gradients, both, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.compat.fsdp1 import FullyShardedDataParallel, MixedPrecision

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


class Chain(nn.Module):
    """All blocks and all calls share one container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Keeping(kind) for _ in range(3))

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x, kept=kept)
        return x


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, collections.UserDict)):
        return [tensor for key in sorted(value) for tensor in tensors_of(value[key])]
    if isinstance(value, Record):
        return tensors_of(sorted_attributes(value))
    return [tensor for item in value or () for tensor in tensors_of(item)]


def sorted_attributes(value: Record) -> dict[str, Any]:
    return dict(sorted(value.__dict__.items()))


def shard(model: Chain, **options: Any) -> Chain:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("reached", ["output", "output and kept", "kept"])
@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_forward_changes_the_containers_it_is_given(kind: str, reached: str) -> None:
    reference = Chain(kind).double()
    model = shard(copy.deepcopy(reference))
    for step in range(3):
        all_kept = []
        for net in (reference, model):
            kept = KINDS[kind][0]()
            output = net(own_input(step).double(), kept)
            output = net(output, kept)
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
            with torch.no_grad():
                for param in net.parameters():
                    param.add_(param.grad, alpha=-0.01)
            net.zero_grad()


def wrapped(model: Chain) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, mixed_precision=MixedPrecision(BF16))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize(("kind", "key"), [("list", 0), ("mapping", "given")])
@on_ranks(2)
def test_what_is_cast_is_as_it_was_where_the_caller_has_it(
    kind: str, key: Any, wraps: bool
) -> None:
    policy = MixedPrecisionPolicy(BF16)
    model = wrapped(Chain(kind)) if wraps else shard(Chain(kind), mp_policy=policy)
    plain = Chain(kind).to(BF16)
    given = torch.full((3, 5), 0.1)  # is another number in bf16
    kept, expected = ({key: given}, {key: given.to(BF16)})
    if kind == "list":
        kept, expected = list(kept.values()), list(expected.values())
    with torch.no_grad():
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            param.copy_(sharded.full_tensor())
        assert torch.equal(model(own_input(), kept), plain(own_input().to(BF16), expected))
    assert kept[key] is given
    kept[key] = expected[key]
    pairs = zip(tensors_of(kept), tensors_of(expected), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)


class Twice(nn.Module):
    """Writes into one of two arguments, and reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, kept: list[Any], *, again: dict[str, Any]) -> torch.Tensor:
        kept.append(self.layer(kept[0]))
        return again["kept"][-1]


@on_ranks(2)
def test_a_container_in_two_places_stays_one() -> None:
    reference = Twice()
    model = fully_shard(copy.deepcopy(reference))
    for net in (reference, model):
        kept = [own_input().requires_grad_()]
        output = net(kept, again={"kept": kept})
        assert output is not kept[0]
        (output.square().sum() + kept[1].sum()).backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(self.layer(kept[0]))
        raise KeyError("after")


@on_ranks(2)
def test_what_forward_has_put_there_before_it_failed_stays() -> None:
    model = fully_shard(Failing())
    given = own_input().requires_grad_()
    kept = [given]
    with pytest.raises(KeyError, match="after"):
        model(kept)
    assert len(kept) == 2
    assert kept[0] is given
