"""Which groups a policy makes, and that what it makes trains as the unsharded model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import Block, Net, assert_parity, own_input, train_step
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from training.cases import reproducible

from composable_shard import FSDPModule, apply_fully_shard, explain, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks


def numels_of(model: nn.Module) -> dict[str, int]:
    return {group.name.replace("(root)", ""): group.numel for group in explain(model).groups}


def names_of(model: nn.Module) -> list[list[str]]:
    return [names.split(", ") for names in numels_of(model)]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Block, [[""], ["blocks.0"], ["blocks.1"]]),
        (is_block, [[""], ["blocks.0"], ["blocks.1"]]),
        ({Block}, [[""], ["blocks.0"], ["blocks.1"]]),
        (frozenset({nn.LayerNorm}), [[""], ["blocks.0.norm"], ["blocks.1.norm"]]),
        (
            (Block, nn.LayerNorm),
            [[""], ["blocks.0"], ["blocks.0.norm"], ["blocks.1"], ["blocks.1.norm"]],
        ),
        (Net, [[""]]),
        (lambda module: {}, None),  # a dict picks, whatever is in it
        (lambda module: True, None),
    ],
)
def test_what_is_picked(policy: Any, names: list[list[str]] | None) -> None:
    with fake_ranks(2):
        model = Net(2)
        expected = names or [
            [name]
            for name, module in model.named_modules()
            if not isinstance(module, nn.ModuleList)
        ]
        assert apply_fully_shard(model, policy) is model
        assert names_of(model) == expected


@pytest.mark.parametrize("policy", [(nn.ModuleList, nn.Conv1d), lambda module: False])
def test_a_policy_that_picks_nothing_is_refused(policy: Any) -> None:
    with fake_ranks(2):
        model = Net(2)
        with pytest.raises(ValueError) as caught:
            apply_fully_shard(model, policy)
        assert str(caught.value) == (
            "Expected policy to pick one of Net, Linear, ModuleList, Block, LayerNorm, got none; "
            "call fully_shard for one group"
        )
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
        fully_shard(model.blocks[0])
        apply_fully_shard(model, policy)
        assert names_of(model) == [[""], ["blocks.0"]]


@on_ranks(2)
def test_arguments_for_some() -> None:
    model = Net(3)
    first = model.blocks[0]

    def policy(module: nn.Module) -> bool | dict[str, Any]:
        if module is first or module is model:
            return {"reshard_after_forward": False}
        return is_block(module)

    apply_fully_shard(model, policy, reshard_after_forward=True)
    with record_events(model, "reshard") as recorded:
        model(own_input())
    freed = [("reshard", "blocks.1"), ("reshard", "blocks.2")]
    assert recorded == freed


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))


@pytest.mark.parametrize(
    ("make", "budget", "names"),
    [
        (lambda: chain(4, 4, 4), 4, [[""], ["0"], ["1"], ["2"]]),
        (lambda: chain(4, 4, 4), 8, [[""]]),  # cannot be two groups of eight
        (lambda: chain(3, 9, 3, 3, 3, 3, 3), 8, [[""], ["1"], ["0", "2", "3"], ["4", "5", "6"]]),
        # A whole inner module rather than all of its parts, and two of them where one is too small.
        (lambda: nn.Sequential(chain(4, 4), chain(4, 4)), 8, [[""], ["0"], ["1"]]),
        (
            lambda: nn.Sequential(*(chain(2, 3) for _ in range(4))),
            8,
            [[""], ["0", "1"], ["2", "3"]],
        ),
    ],
)
def test_groups_of_a_budget(
    make: Callable[[], nn.Module], budget: int, names: list[list[str]]
) -> None:
    with fake_ranks(2):
        assert sorted(names_of(apply_fully_shard(make(), budget))) == sorted(names)
        model = chain(4, 4, 4, 4)  # ignored parameters do not count
        apply_fully_shard(model, 8, ignored_params={model[0].weight})
        assert names_of(model) == [[""]]
        assert not isinstance(model[0].weight, torch.distributed.tensor.DTensor)


class Node(nn.Module):
    """A module of any shape: parameters of its own and children, in a list or not."""

    def __init__(self, numel: int, children: list[nn.Module], in_list: bool) -> None:
        super().__init__()
        if numel:
            self.own = nn.Parameter(torch.zeros(numel))
        if in_list:
            self.inner = nn.ModuleList(children)
        else:
            for index, child in enumerate(children):
                self.add_module(f"child{index}", child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


trees = st.recursive(
    st.builds(Node, st.integers(0, 12), st.just([]), st.booleans()),
    lambda inner: st.builds(Node, st.integers(0, 12), st.lists(inner, max_size=5), st.booleans()),
    max_leaves=25,
)


@reproducible(100)
@given(trees, st.integers(1, 40))
def test_generated_trees(tree: Node, budget: int) -> None:
    total = sum(param.numel() for param in tree.parameters())
    own = {module: sum(p.numel() for p in module.parameters(False)) for module in tree.modules()}
    with fake_ranks(2):
        apply_fully_shard(tree, budget)
        numels = numels_of(tree)
        assert sum(numels.values()) == total  # each parameter in one group
        assert numels.pop("") < max(2 * budget, budget + own[tree])
        for names, numel in numels.items():
            brought = max(own[tree.get_submodule(name)] for name in names.split(", "))
            assert budget <= numel < max(2 * budget, budget + brought)


POLICIES: dict[str, Any] = {"class": Block, "function": is_block, "budget": 120, "small": 30}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@on_ranks("num_ranks")
def test_what_is_picked_trains(policy: str) -> None:
    reference = Net(4)
    model = apply_fully_shard(copy.deepcopy(reference), POLICIES[policy])
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (reference, model)]
    for step in range(3):
        for one, optimizer in zip((reference, model), optimizers, strict=True):
            train_step(one, step, optimizer)
        assert_parity(model, reference)
    assert len(names_of(model)) > 3


NOT_A_POLICY = (
    "Expected policy to be module classes, a function of a module or a number of elements, "
    "got {}: {}"
)
NOT_AN_ANSWER = "Expected policy to return a bool or a dict of arguments, got NoneType for Linear"
NOT_A_BUDGET = "Expected the number of elements in policy of at least 1, got 0"


def last_gets(**arguments: Any) -> Callable[[nn.Module], Any]:
    """Return a policy by which all is as it should be but for the output layer, or the root."""
    return lambda module: (
        arguments if isinstance(module, Net) or "out_features=3" in repr(module) else True
    )


def second_dim_of_three_rows(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.shape[0] == 3 else None


DIM = "ValueError: Expected shard_placement_fn to return a dim within the 1 dims of parameter "
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (last_gets(reshard=True), {}, "TypeError: got an unexpected keyword argument 'reshard'"),
    (
        last_gets(reshard_after_forward=3),
        {},
        "ValueError: Expected reshard_after_forward to divide the number of shards, got 3 for 2 "
        "shards",
    ),
    (
        last_gets(mp_policy=torch.bfloat16),
        {},
        "TypeError: Expected mp_policy to be a composable_shard.MixedPrecisionPolicy, got "
        "torch.dtype",
    ),
    (Block, {"shard_placement_fn": second_dim_of_three_rows}, f"{DIM}'out.bias', got Shard(dim=1)"),
    (30, {"shard_placement_fn": second_dim_of_three_rows}, DIM),
    *(
        (policy, {}, f"TypeError: {NOT_A_POLICY.format(type(policy).__name__, repr(policy))}")
        for policy in ("Block", True, 0.5, int, (), {3})
    ),
    (lambda module: None, {}, f"TypeError: {NOT_AN_ANSWER}"),
    (0, {}, f"ValueError: {NOT_A_BUDGET}"),
]


@pytest.mark.parametrize(("policy", "kwargs", "text"), REFUSED)
def test_what_is_refused_leaves_all_as_it_was(
    policy: Any, kwargs: dict[str, Any], text: str
) -> None:
    with fake_ranks(2):
        model = Net(2)
        parts = [(part, type(part)) for part in model.modules()]
        params = list(model.named_parameters())
        with pytest.raises((TypeError, ValueError)) as caught:
            apply_fully_shard(model, policy, **kwargs)
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert said.startswith(text) if text is DIM else said == text
        assert [(part, type(part)) for part in model.modules()] == parts
        left = model.named_parameters()
        assert all(a == b and p is q for (a, p), (b, q) in zip(left, params, strict=True))
