"""Parameters that several groups share belong to the lowest group that contains all places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, step_differences
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composable_shard import ShardError, explain, fully_shard, unsharded
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks

VOCABULARY = 11
WIDTH = 6


class Inner(nn.Module):
    """An embedding and a head that share a weight, two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)).tanh())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.last = nn.Linear(VOCABULARY, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(tokens).sin())


Groups = tuple[str, ...]


def sharded(groups: Groups, **options: object) -> tuple[Outer, Oracle]:
    torch.manual_seed(0)
    model = Outer()
    oracle = Oracle(model)
    for name in groups:
        fully_shard(model.get_submodule(name), **options)
    return model, oracle


CASES: list[tuple[Groups, str]] = [
    (("inner.embedding", ""), ""),
    (("inner.head", "inner.middle", ""), ""),
    (("inner.embedding", "inner.head", ""), ""),
    (("inner.embedding", "inner.middle", "inner.head", "inner", ""), "inner"),
    (("inner.embedding", "inner", "last", ""), "inner"),
    (("inner", ""), "inner"),
]


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize(("groups", "owner"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_tied_across_groups_trains_as_the_oracle_with_one_gradient(
    groups: Groups, owner: str, reshard: bool | None
) -> None:
    model, oracle = sharded(groups, reshard_after_forward=reshard)
    weight = model.inner.embedding.weight
    assert model.inner.head.weight is weight
    owners = [
        group.name
        for group in explain(model).groups
        if any(model.get_parameter(param.name) is weight for param in group.parameters)
    ]
    assert owners == [owner or "(root)"]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (7,), generator=generator)
        for either in (model, oracle.model):
            either(tokens).square().sum().backward()
        oracle.take()
        oracle.reduce()
        model.reshard()  # type: ignore[operator]
        assert step_differences(model, oracle, optimizers) == []


def test_a_group_that_gave_everything_back_gathers_nothing_and_states_hold_both_names() -> None:
    with fake_ranks(2):
        model, oracle = sharded(("inner.embedding", "inner.head", ""))
        with record_events(model, "all_gather", "reduce_scatter") as events:
            model(torch.tensor([1, 2])).sum().backward()
        assert events == [("all_gather", ""), ("reduce_scatter", "")]
        assert list(model.state_dict()) == list(oracle.model.state_dict())
        full = {name: tensor + 1 for name, tensor in oracle.model.state_dict().items()}
        model.load_state_dict(full)
        rows = model.inner.embedding.weight.to_local()  # type: ignore[operator]
        assert torch.equal(rows, full["inner.head.weight"][: rows.shape[0]])
        assert model.inner.embedding.weight is model.inner.head.weight


def test_without_a_group_that_contains_all_places_the_forward_is_refused() -> None:
    with fake_ranks(2):
        model, _ = sharded(("inner.embedding", "inner.head"))
        assert type(model.inner.head.weight) is nn.Parameter
        with pytest.raises(ShardError) as caught:
            model(torch.tensor([1, 2]))
        assert str(caught.value) == (
            "Expected one group to contain all modules with a tied parameter, got none for "
            "'weight' of FSDPEmbedding, 'weight' of FSDPLinear; apply fully_shard to the module "
            "that contains them"
        )


def after_use() -> Any:
    model, _ = sharded(("inner.embedding",))
    model.inner.embedding(torch.tensor([1]))
    return model


def after_an_edit() -> Any:
    model, _ = sharded(("inner.embedding",))
    with torch.no_grad():
        model.inner.embedding.weight.mul_(2)
    return model


def after_it_was_sharded() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    model[1].weight = model[0].weight
    return model


def after_what_is_around() -> Any:
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[0]


USED = (
    "Expected parameter 'inner.head.weight' to be sharded with 'weight', to which it is tied, got "
    "a call after that group was used or changed; shard all modules that share it before use"
)
SHARDED_TWICE = (
    "Expected parameter '{}' to be sharded once, got the sharded parameter '{}' of another group; "
    "shard inner modules before outer ones, tie parameters before any call, and give added modules "
    "a call of their own"
)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (after_use, USED),
        (after_an_edit, USED),
        (after_it_was_sharded, SHARDED_TWICE.format("1.weight", "weight")),
        (after_what_is_around, SHARDED_TWICE.format("weight", "0.weight")),
    ],
)
def test_sharding_too_late_is_refused(build: Callable[[], Any], text: str) -> None:
    with fake_ranks(2):
        model = build()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError) as caught:
            fully_shard(model)
        assert str(caught.value) == text
        assert dict(model.named_parameters()) == before


@pytest.mark.parametrize("gathers", [False, True])
@on_ranks(2)
def test_an_edit_through_a_group_that_does_not_own_it_is_kept(gathers: bool) -> None:
    model: Any = sharded(("inner.embedding", "inner.head", ""))[0]
    if gathers:
        model.unshard()
    with unsharded(model.inner.head), torch.no_grad():
        assert not isinstance(model.inner.embedding.weight, DTensor)
        model.inner.head.weight.fill_(3)
    model.reshard()
    assert model.inner.embedding.weight is model.inner.head.weight
    assert (model.inner.embedding.weight.full_tensor() == 3).all()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("place", ["embedding", "head"])
def test_a_tied_weight_is_replaced_under_any_of_its_names(place: str, used: bool) -> None:
    """By a sharded one; a plain one is refused."""
    tokens = torch.tensor([1, 2, 3])
    values = torch.arange(VOCABULARY * WIDTH).view(VOCABULARY, WIDTH).cos()
    expected = Inner()
    with fake_ranks(1):
        model: Any = fully_shard(copy.deepcopy(expected))
        if used:
            model(tokens).sum().backward()
        new = DTensor.from_local(values, model.head.weight.device_mesh, [Shard(0)])
        model.get_submodule(place).weight = nn.Parameter(new)
        with torch.no_grad():
            expected.head.weight.copy_(values)
        torch.testing.assert_close(model(tokens), expected(tokens))
        assert model.head.weight is model.embedding.weight
        model.get_submodule(place).weight = nn.Parameter(values)
        with pytest.raises(ShardError) as caught:
            model(tokens)
        assert str(caught.value) == (
            "Expected the parameters of the root group as fully_shard made them, got a plain "
            "tensor for 'embedding.weight'; change values by load_state_dict or in place"
        )


def test_a_group_loses_tied_parameters_one_after_the_other() -> None:
    """The shards that it keeps move, which is no change."""
    first, second, third, fourth = (nn.Linear(4, 4, bias=False) for _ in range(4))
    third.weight, fourth.weight = first.weight, second.weight
    root = nn.Sequential(nn.Sequential(nn.Sequential(first, second), third), fourth)
    with fake_ranks(2):
        for module in (root[0][0], root[0], root):
            fully_shard(module)
    assert third.weight is first.weight and fourth.weight is second.weight
    assert len(list(root.parameters())) == 2
