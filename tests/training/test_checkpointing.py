"""Activation checkpointing, inside and around sharded modules, changes no number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, average_gradients
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from composable_shard import MixedPrecisionPolicy, fully_shard
from training.scenarios import STACK_GROUPS, Block, Scenario, Stack, assert_same, loss_of
from training.trees import WIDTH, inputs_for

Backward = Callable[..., None]


class CheckpointedInside(Block):
    """A block that recomputes what is between its own parameters."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.checkpoints = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedAround(Stack):
    """A stack that recomputes each of its blocks."""

    def __init__(self, reentrant: bool, nested: bool = False) -> None:
        blocks = [CheckpointedInside(reentrant) for _ in range(3)] if nested else None
        super().__init__(blocks)
        self.reentrant = reentrant
        self.checkpoints = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return super().forward(x)
        x = x * self.first
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def once(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    # The oracle lends its parameters while it runs; what recomputes later would miss them.
    plain = getattr(model, "model", None)
    if plain is not None:
        for module in plain.modules():
            if hasattr(module, "checkpoints"):
                module.checkpoints = False
    loss = loss_of(model(x))
    backward(loss)
    return loss


def several(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    first = once(model, x, backward)
    losses = [loss_of(model(x * scale)) for scale in (2, 3)]
    backward(sum(losses))
    return first, *losses


@dataclass(frozen=True)
class Make:
    kind: str
    reentrant: bool

    def __call__(self) -> nn.Module:
        if self.kind == "inside":
            return Stack([CheckpointedInside(self.reentrant) for _ in range(3)])
        return CheckpointedAround(self.reentrant, nested=self.kind == "nested")


LINEARS = ("blocks.0.up", "blocks.0.down", "blocks.1", "blocks.2.up", "")


@pytest.mark.parametrize(("ranks", "do"), [(2, several), (3, once)])
@pytest.mark.parametrize(
    ("groups", "reshard"),
    [(STACK_GROUPS, True), (STACK_GROUPS, False), (LINEARS, True), (("",), None)],
    ids=["blocks", "blocks not resharded", "linears", "root"],
)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["inside", "around", "nested"])
def test_a_checkpoint_changes_no_number(
    kind: str, reentrant: bool, groups: tuple[str, ...], reshard: bool | None, ranks: int, do: Any
) -> None:
    options = {"reshard_after_forward": reshard}
    exact = do is once or not reentrant
    scenario = Scenario(Make(kind, reentrant), do, groups, options, exact=exact)
    assert_same(scenario, ranks)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_recomputes_in_the_same_precision(reentrant: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for kind in ("inside", "around"):
        options = {"mp_policy": policy}
        assert_same(Scenario(Make(kind, reentrant), once, STACK_GROUPS, options), 2)


# Selective checkpoints ----------------------------------------------------------------------------


def saves_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def saves_what_is_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_cheap = torch.Tag.pointwise in op.tags
    return CheckpointPolicy.PREFER_RECOMPUTE if is_cheap else CheckpointPolicy.MUST_SAVE


class Selective(nn.Module):
    """Recomputes a part of its layers."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, WIDTH))
            for _ in range(2)
        )
        self.contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        return x


@pytest.mark.parametrize("policy", [saves_all, saves_what_is_costly])
@on_ranks(2)
def test_a_selective_checkpoint_does_not_see_the_gather(policy: Any) -> None:
    torch.manual_seed(0)
    plain = Selective(policy)
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(2):
        for one in (model, plain):
            one(inputs_for(step, dist.get_rank())).square().sum().backward()
        average_gradients(plain.parameters())
        assert_parity(model, plain)
        model.zero_grad()
        plain.zero_grad()
