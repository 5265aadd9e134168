"""Ranks whose losses reach different modules, or take different ways, agree on the exact mean."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import average_gradients, full
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from training.scenarios import Block, Do, Scenario, Stack, assert_same, loss_of
from training.trees import WIDTH, inputs_for

Backward = Callable[..., None]


class Heads(nn.Module):
    """A trunk and three heads, each a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block()
        self.heads = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x) * self.scale
        return [head(x) for head in self.heads]


HEADS = ("trunk", "heads.0", "heads.1", "heads.2", "")


def own_head(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    outputs = model(x)
    loss = loss_of(outputs[dist.get_rank() % 3])
    backward(loss)
    return loss


def first_rank_misses_a_head(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    outputs = model(x)
    loss = loss_of(outputs[0]) if dist.get_rank() == 0 else loss_of(outputs[0] + outputs[1])
    backward(loss)
    return loss


def last_rank_misses_a_head(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    outputs = model(x)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    loss = loss_of(outputs[2]) if is_last else loss_of(outputs[0] + outputs[2])
    backward(loss)
    return loss


def no_rank_needs_the_last_head(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    outputs = model(x)
    loss = loss_of(outputs[0] * outputs[1])
    backward(loss)
    return loss


def heads_in_another_order(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    """The order in which a backward comes to the heads differs between ranks."""
    outputs = model(x)
    turned = outputs[::-1] if dist.get_rank() % 2 else outputs
    total = turned[0]
    for output in turned[1:]:
        total = torch.tanh(total) + output
    loss = loss_of(total)
    backward(loss)
    return loss


def some_microbatches_reach_less(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    losses = []
    for microbatch in range(2):
        outputs = model(x * (microbatch + 1))
        loss = loss_of(outputs[(microbatch + dist.get_rank()) % 3])
        backward(loss)
        losses.append(loss)
    return losses


def heads(
    do: Do, groups: tuple[str | tuple[str, ...], ...], num_steps: int = 3, **options: Any
) -> Scenario:
    # A boundary adds up a module's input gradients before those of several modules are added,
    # so the sums are taken in another order than without.
    return Scenario(Heads, do, groups, options, num_steps, exact=False)


WAYS: list[Do] = [
    own_head,
    first_rank_misses_a_head,
    last_rank_misses_a_head,
    no_rank_needs_the_last_head,
    heads_in_another_order,
    some_microbatches_reach_less,
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("do", WAYS, ids=lambda do: do.__name__)
def test_losses_may_reach_other_groups_on_other_ranks(do: Do, reshard: bool, ranks: int) -> None:
    assert_same(heads(do, HEADS, reshard_after_forward=reshard), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("do", WAYS, ids=lambda do: do.__name__)
def test_heads_of_one_group_may_be_reached_on_some_ranks(do: Do, ranks: int) -> None:
    groups = ("trunk", ("heads.0", "heads.1", "heads.2"), "")
    assert_same(heads(do, groups), ranks)


@pytest.mark.parametrize("do", WAYS, ids=lambda do: do.__name__)
def test_losses_may_reach_other_groups_in_low_precision(do: Do) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert_same(heads(do, HEADS, num_steps=1, mp_policy=policy), 2)


# Ways through the model that depend on the data ----------------------------------------------


class Routed(nn.Module):
    """Sends each row to one of two experts; a batch may need only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = x @ self.router
        total = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = (score > 0) if place else (score <= 0)
            if rows.any():
                chosen = expert(x[rows]) * score[rows].sigmoid().unsqueeze(1)
                total = total.index_put((rows.nonzero().squeeze(1),), chosen)
        return total + x


def routed() -> nn.Module:
    return Stack([Routed() for _ in range(3)])


def one_kind_of_rows(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    """Each rank's rows are alike, so that a rank uses one expert of each block."""
    x = x[:1].expand(4, -1).clone()
    loss = loss_of(model(x))
    backward(loss)
    return loss


def rows_of_all_kinds(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    loss = loss_of(model(torch.cat([x, -x])))
    backward(loss)
    return loss


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("do", [one_kind_of_rows, rows_of_all_kinds])
def test_the_data_may_decide_which_parameters_are_used(do: Do, ranks: int) -> None:
    groups = ("blocks.0", "blocks.1", "blocks.2", "")
    assert_same(Scenario(routed, do, groups, num_steps=6), ranks)


# Gradients of zeros for what no rank used -----------------------------------------------------


class Partly(nn.Module):
    """Uses its second layer in the first step alone, and its last one never."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.once, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.used(self.once(x) if step == 0 else x)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_unused_parameters_decay_if_they_are_to_be_reduced(accumulates: bool) -> None:
    torch.manual_seed(0)
    plain = Partly()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.once)
    fully_shard(model).set_reduce_scatter_unused_params(True)
    optimizers = [
        torch.optim.AdamW(one.parameters(), 0.1, weight_decay=1.0) for one in (model, plain)
    ]
    for step in range(2):
        for is_last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(is_last)
            for one in (model, plain):
                one(inputs_for(step, dist.get_rank()), step).square().sum().backward()
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average_gradients(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)), param, msg=name)
