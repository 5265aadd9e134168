"""Parameters that several groups share belong to the lowest group that contains all places."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, step_differences
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable_shard import ShardError, explain, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks

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


def train(groups: Groups, owner: str, reshard: bool | None) -> list[str]:
    model, oracle = sharded(groups, reshard_after_forward=reshard)
    found = []
    weight = model.inner.embedding.weight
    if model.inner.head.weight is not weight:
        found.append("no longer tied")
    owners = [
        group.name
        for group in explain(model).groups
        if any(model.get_parameter(param.name) is weight for param in group.parameters)
    ]
    if owners != [owner or "(root)"]:
        found.append(f"owned by {owners}")
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (7,), generator=generator)
        for either in (model, oracle.model):
            either(tokens).square().sum().backward()
        oracle.take()
        oracle.reduce()
        model.reshard()  # type: ignore[operator]
        found += step_differences(model, oracle, optimizers)
    return found


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
def test_tied_across_groups_trains_as_the_oracle_with_one_gradient(
    ranks: int, groups: Groups, owner: str, reshard: bool | None
) -> None:
    assert run_ranks(train, ranks, groups, owner, reshard, timeout=30) == [[]] * ranks


def test_from_the_meta_device() -> None:
    with fake_ranks(2):
        with torch.device("meta"):
            model = Outer()
        for name in ("inner.embedding", "inner.head", ""):
            fully_shard(model.get_submodule(name))
        model.to_empty(device="cpu")
        assert model.inner.embedding.weight is model.inner.head.weight
        assert isinstance(model.inner.head.weight, DTensor)
        assert [name for name, _ in model.named_parameters()] == [
            "inner.embedding.weight",
            "inner.middle.weight",
            "inner.middle.bias",
            "last.weight",
            "last.bias",
        ]
        model(torch.tensor([1, 2])).sum().backward()


def test_a_group_that_gave_everything_back_gathers_nothing() -> None:
    with fake_ranks(2):
        model, _ = sharded(("inner.embedding", "inner.head", ""))
        with record_events(model, "all_gather", "reduce_scatter") as events:
            model(torch.tensor([1, 2])).sum().backward()
        assert events == [("all_gather", ""), ("reduce_scatter", "")]


def test_state_dicts_hold_both_names() -> None:
    with fake_ranks(2):
        model, oracle = sharded(("inner.embedding", "inner.head", ""))
        state = model.state_dict()
        assert list(state) == list(oracle.model.state_dict())
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
            "Expected a group that contains all places of a tied parameter, got none for 'weight' "
            "of FSDPEmbedding, 'weight' of FSDPLinear; apply fully_shard to the module that "
            "contains them"
        )


def test_a_group_that_was_used_cannot_give_a_parameter_back() -> None:
    with fake_ranks(2):
        model, _ = sharded(("inner.embedding",))
        model.inner.embedding(torch.tensor([1]))
        before = dict(model.named_parameters())
        with pytest.raises(ValueError) as caught:
            fully_shard(model)
        assert str(caught.value) == (
            "Expected parameter 'inner.head.weight' to be tied before its group was used, got one "
            "that is tied to 'weight' of a group that was gathered, loaded or changed; apply "
            "fully_shard to all modules that share it before"
        )
        assert dict(model.named_parameters()) == before


def test_tying_a_sharded_parameter_is_refused() -> None:
    with fake_ranks(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        model[1].weight = model[0].weight
        with pytest.raises(ValueError) as caught:
            fully_shard(model)
        assert str(caught.value) == (
            "Expected parameter '1.weight' to be sharded by one fully_shard call, got the sharded "
            "parameter 'weight' of another group; shard inner modules before outer ones, tie "
            "parameters before either, and where a sharded base was wrapped shard the new "
            "adapters alone"
        )


def test_an_outer_module_before_an_inner_one_is_refused() -> None:
    with fake_ranks(2):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises(ValueError) as caught:
            fully_shard(model[0])
        assert str(caught.value) == (
            "Expected parameter 'weight' to be sharded by one fully_shard call, got the sharded "
            "parameter '0.weight' of another group; shard inner modules before outer ones, tie "
            "parameters before either, and where a sharded base was wrapped shard the new "
            "adapters alone"
        )


def test_nothing_keeps_a_tied_module_alive() -> None:
    import gc
    import weakref

    with fake_ranks(2):
        model, _ = sharded(("inner.embedding", "inner.head"))
        alive = weakref.ref(model.inner.embedding)
        del model, _
        gc.collect()
        assert alive() is None


def test_tied_parameters_stay_tied() -> None:
    with fake_ranks(2):
        model = Outer()
        for name in ("inner.embedding", "inner.head", ""):
            fully_shard(model.get_submodule(name))
        copied = copy.deepcopy(model)
        assert copied.inner.embedding.weight is copied.inner.head.weight
        assert copied.inner.head.weight is not model.inner.head.weight
        copied(torch.tensor([1, 2])).sum().backward()
        assert copied.inner.head.weight.grad is not None and model.inner.head.weight.grad is None


def replaced(place: str, kind: str, used: bool) -> tuple[str, torch.Tensor]:
    """Replace a tied weight under one of its names; return the error, or what the module gives."""
    torch.manual_seed(0)
    model = fully_shard(Inner())
    tokens = torch.tensor([1, 2, 3])
    if used:
        model(tokens).sum().backward()
    values = torch.arange(VOCABULARY * WIDTH).view(VOCABULARY, WIDTH).cos()
    new = nn.Parameter(values)
    if kind == "sharded":
        new = nn.Parameter(distribute_tensor(values, model.head.weight.device_mesh, [Shard(0)]))
    model.get_submodule(place).weight = new
    try:
        output = model(tokens)
    except ShardError as error:
        return str(error), torch.empty(0)
    torch.manual_seed(0)
    expected = Inner()
    with torch.no_grad():
        expected.head.weight.copy_(values)
    torch.testing.assert_close(output, expected(tokens))
    assert model.head.weight is model.embedding.weight
    return "", output.detach()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("place", ["embedding", "head"])
def test_a_tied_weight_is_replaced_under_any_of_its_names(place: str, used: bool) -> None:
    with fake_ranks(1):
        assert replaced(place, "sharded", used)[0] == ""
        assert replaced(place, "plain", used)[0] == (
            "Expected the parameters of the root group as fully_shard made them, got others for "
            "['embedding.weight']; change values by load_state_dict or in place"
        )
