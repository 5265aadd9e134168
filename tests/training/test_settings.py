"""What a training loop may set costs time or memory, never exactness."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import Net, shard_net
from torch import nn

from composable_shard import FSDPModule
from composable_shard.testing import run_ranks
from composable_shard.testing.training import Plan, Rehearsal
from training.cases import OPTIMIZERS, reproducible

Setting = tuple[str, str, bool]
"""Name of a module, of a setter, and what to set."""


GROUPS = ("blocks.0", "blocks.1", "blocks.2", "")


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(3, 4)).square().mean()


PLAN = Plan(partial(Net, 3), shard_net, loss_of, OPTIMIZERS["sgd"])


# Microbatches whose reductions overlap ------------------------------------------------------


class InMicrobatches(Rehearsal):
    """Has a step of several backwards; gradients are complete after the last."""

    def several(self, num_microbatches: int, alternates: bool) -> list[str]:
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            self.model.set_is_last_backward(is_last)
            syncs = is_last or not alternates or microbatch % 2 == 0
            self.model.set_requires_gradient_sync(syncs)
            self._go_back(reduces=syncs)
            self.num_steps += 1
        found = self.differences()
        return [*found, *self.do("step"), *self.do("zero_grad")]


def train_in_microbatches(num_microbatches: int, alternates: bool) -> list[str]:
    rehearsal = InMicrobatches(PLAN)
    return [text for _ in range(2) for text in rehearsal.several(num_microbatches, alternates)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("alternates", [False, True])
def test_gradients_are_complete_after_the_last_of_several_backwards(
    alternates: bool, ranks: int
) -> None:
    for num_microbatches in (2, 4):
        differences = run_ranks(
            train_in_microbatches, ranks, num_microbatches, alternates, timeout=20
        )
        assert differences == [[]] * ranks, differences


# Any settings at any time -------------------------------------------------------------------

SETTERS = ("set_reshard_after_forward", "set_reshard_after_backward")


@dataclass(frozen=True)
class Settings:
    """For each step, what is set before its forward, and what between forward and backward."""

    before: tuple[tuple[Setting, ...], ...]
    between: tuple[tuple[Setting, ...], ...]
    prefetch: tuple[tuple[int, ...], ...]


def train_with(settings: Settings) -> list[str]:
    rehearsal = Rehearsal(PLAN)
    model = rehearsal.model
    groups = [model.get_submodule(name) for name in GROUPS]
    found: list[str] = []
    for before, between in zip(settings.before, settings.between, strict=True):
        for group, targets in zip(groups, settings.prefetch, strict=False):
            assert isinstance(group, FSDPModule)
            modules = [groups[target] for target in targets]
            group.set_modules_to_forward_prefetch(modules)  # type: ignore[arg-type]
            group.set_modules_to_backward_prefetch(modules[::-1])  # type: ignore[arg-type]
        apply(model, before)
        found += rehearsal.do("forward")
        apply(model, between)
        found += rehearsal.do("backward") + rehearsal.do("step") + rehearsal.do("zero_grad")
    return found


def apply(model: nn.Module, settings: tuple[Setting, ...]) -> None:
    for name, setter, value in settings:
        getattr(model.get_submodule(name), setter)(value, recurse=name == "")


setting = st.tuples(st.sampled_from(GROUPS), st.sampled_from(SETTERS), st.booleans())


@st.composite
def any_settings(draw: st.DrawFn) -> tuple[Settings, int]:
    num_steps = draw(st.integers(2, 4))
    for_one_step = st.lists(setting, max_size=3).map(tuple)
    targets = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    settings = Settings(
        tuple(draw(for_one_step) for _ in range(num_steps)),
        tuple(draw(for_one_step) for _ in range(num_steps)),
        tuple(draw(st.lists(targets, max_size=4))),
    )
    return settings, draw(st.integers(1, 3))


@reproducible(40)
@given(any_settings())
def test_any_settings_give_the_gradients_of_the_oracle(case: tuple[Settings, int]) -> None:
    settings, ranks = case
    differences = run_ranks(train_with, ranks, settings, timeout=20)
    assert differences == [[]] * ranks, differences
