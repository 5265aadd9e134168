"""Frozen, thawed, low-rank adapted and tied parameters train as in the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks
from training.cases import reproducible
from training.compare import Comparison, step_both
from training.oracle import Unsharded
from training.scenarios import STACK_GROUPS, Block, Scenario, Stack, assert_same, loss_of
from training.trees import WIDTH, inputs_for

Backward = Callable[..., None]
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def once(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(x))
    backward(loss)
    return loss


def with_input_gradient(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    x.requires_grad_()
    loss = loss_of(model(x))
    backward(loss)
    assert x.grad is not None
    return loss, x.grad


# Frozen from the start ----------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer and a trainable correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


def adapted() -> nn.Module:
    return Stack([Adapted() for _ in range(3)])


def frozen_block() -> nn.Module:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    return model


def frozen_beginning() -> nn.Module:
    model = Stack()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def frozen_biases() -> nn.Module:
    model = Stack()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    return model


MODELS = [adapted, frozen_block, frozen_beginning, frozen_biases]


@pytest.mark.parametrize(("ranks", "do"), [(2, with_input_gradient), (3, once)])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("groups", [STACK_GROUPS, ("",)], ids=["nested", "root"])
def test_a_partly_frozen_model_trains_as_unsharded(
    groups: tuple[str, ...], model: Callable[[], nn.Module], reshard: bool, ranks: int, do: Any
) -> None:
    options = {"reshard_after_forward": reshard}
    assert_same(Scenario(model, do, groups, options), ranks)


@pytest.mark.parametrize("model", MODELS)
def test_a_partly_frozen_model_trains_in_low_precision(model: Callable[[], nn.Module]) -> None:
    assert_same(Scenario(model, once, STACK_GROUPS, {"mp_policy": BF16}), 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_adapters_may_be_sharded_apart_from_what_they_adapt(ranks: int) -> None:
    groups = ("blocks.0.base", "blocks.1.base", "blocks.2.base", *STACK_GROUPS)
    assert_same(Scenario(adapted, once, groups), ranks)


# Frozen and thawed between iterations -------------------------------------------------------


@dataclass(frozen=True)
class Thawing:
    """For each iteration, which of the parameters are trainable (by index, modulo)."""

    trainable: tuple[tuple[bool, ...], ...]
    policy: MixedPrecisionPolicy
    grouped: bool
    accumulates: bool


def thaw(case: Thawing) -> list[str]:
    model = Stack()
    oracle = Unsharded(model, case.policy)
    for name in STACK_GROUPS if case.grouped else ("",):
        fully_shard(model.get_submodule(name), mp_policy=case.policy)
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    sharded = list(model.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for step, flags in enumerate(case.trainable):
        for params in (sharded, oracle.model.parameters()):
            for param, trainable in zip(params, _repeated(flags), strict=False):
                param.requires_grad_(trainable)
        oracle.refresh()
        x = inputs_for(step, dist.get_rank())
        losses = [loss_of(m(x)) for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        if any(flags):
            for loss in losses:
                loss.backward()
            oracle.after_backward()
        comparison.grads(f"step {step}")
        if not case.accumulates:
            step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


def _repeated(flags: tuple[bool, ...]) -> Iterator[bool]:
    while True:
        yield from flags


@st.composite
def thawings(draw: st.DrawFn) -> tuple[Thawing, int]:
    flags = st.lists(st.booleans(), min_size=1, max_size=5).map(tuple)
    case = Thawing(
        tuple(draw(st.lists(flags, min_size=2, max_size=5))),
        draw(st.sampled_from([MixedPrecisionPolicy(), BF16])),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    return case, draw(st.integers(1, 3))


@reproducible(40)
@given(thawings())
def test_parameters_may_be_frozen_and_thawed_between_iterations(
    case: tuple[Thawing, int],
) -> None:
    thawing, ranks = case
    differences = run_ranks(thaw, ranks, thawing, timeout=20)
    assert differences == [[]] * ranks, differences


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_parameter_frozen_at_the_first_forward_is_thawed_later(
    ranks: int, policy: MixedPrecisionPolicy
) -> None:
    flags = ((True, False), (True, True), (False, True), (False, False), (True, True))
    for grouped in (True, False):
        case = Thawing(flags, policy, grouped, accumulates=False)
        differences = run_ranks(thaw, ranks, case, timeout=20)
        assert differences == [[]] * ranks, differences


# Tied ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too, and a block that shares its bias."""

    def __init__(self, big: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1301 if big else 5, 64 if big else WIDTH)
        width = self.embedding.embedding_dim
        self.mid = nn.Linear(width, width)
        self.also_mid = nn.Linear(width, width)
        self.also_mid.bias = self.mid.bias
        self.last = nn.Linear(width, self.embedding.num_embeddings, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.sum(1) * 7).long() % self.embedding.num_embeddings
        hidden = torch.tanh(self.mid(self.embedding(ids)))
        return self.last(hidden + self.also_mid(hidden))


class TiedTrained(nn.Module):
    """Returns a loss, for a model whose output has another width."""

    def __init__(self, big: bool = False) -> None:
        super().__init__()
        self.body = Tied(big)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.body(x)
        return F.cross_entropy(logits.float(), torch.arange(len(logits)))


def big_tied() -> nn.Module:
    return TiedTrained(big=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", [TiedTrained, big_tied])
@pytest.mark.parametrize("groups", [("",), ("body", "")])
def test_tied_parameters_of_one_group_have_one_gradient(
    groups: tuple[str, ...], model: Callable[[], nn.Module], reshard: bool, ranks: int
) -> None:
    options = {"reshard_after_forward": reshard}
    assert_same(Scenario(model, once, groups, options), ranks)


def tied_parameters() -> list[bool]:
    model = fully_shard(Tied())
    same = [model.last.weight is model.embedding.weight, model.mid.bias is model.also_mid.bias]
    model(inputs_for(0, 0))
    same.append(len(list(model.parameters())) == 4)
    return same


def test_tied_parameters_stay_one_object() -> None:
    assert run_ranks(tied_parameters, 2) == [[True, True, True]] * 2


class TiedBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            assert isinstance(block, Block)
            block.up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_list_of_modules_may_share_parameters(ranks: int) -> None:
    groups = (("blocks.0", "blocks.1", "blocks.2"), "")
    assert_same(Scenario(TiedBlocks, once, groups), ranks)
