"""What a training loop may set costs time or memory, never exactness."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from nets import Net, own_input, shard_net
from torch import nn

from composable_shard import FSDPModule
from composable_shard.testing import run_ranks
from training.cases import reproducible
from training.compare import Comparison, step_both
from training.oracle import Unsharded

Setting = tuple[str, str, bool]
"""Name of a module, of a setter, and what to set."""


GROUPS = ("blocks.0", "blocks.1", "blocks.2", "")


def sharded_net() -> tuple[Net, Unsharded]:
    torch.manual_seed(3)
    model = Net(3)
    oracle = Unsharded(model)
    return shard_net(model), oracle


def losses_of(model: nn.Module, oracle: Unsharded, step: int) -> list[torch.Tensor]:
    return [m(own_input(step)).square().mean() for m in (model, oracle)]


# Microbatches whose reductions overlap ------------------------------------------------------


def train_in_microbatches(num_microbatches: int, alternates: bool) -> list[str]:
    """Gradients are complete after the last of several backwards."""
    model, oracle = sharded_net()
    assert isinstance(model, FSDPModule)
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for step in range(3):
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            model.set_is_last_backward(is_last)
            syncs = is_last or not alternates or microbatch % 2 == 0
            model.set_requires_gradient_sync(syncs)
            losses = losses_of(model, oracle, 10 * step + microbatch)
            for loss in losses:
                loss.backward()
            oracle.after_backward(sync=syncs)
            comparison.tensor(f"step {step}: loss {microbatch}", *losses)
        comparison.grads(f"step {step}")
        comparison.exact &= not oracle.has_folded
        step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("alternates", [False, True])
def test_gradients_are_complete_after_the_last_of_several_backwards(
    alternates: bool, ranks: int
) -> None:
    for num_microbatches in (1, 2, 4):
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
    model, oracle = sharded_net()
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (params, oracle.model.parameters())]
    groups = [model.get_submodule(name) for name in GROUPS]
    for step in range(len(settings.before)):
        for group, targets in zip(groups, settings.prefetch, strict=False):
            assert isinstance(group, FSDPModule)
            modules = [groups[target] for target in targets]
            group.set_modules_to_forward_prefetch(modules)  # type: ignore[arg-type]
            group.set_modules_to_backward_prefetch(modules[::-1])  # type: ignore[arg-type]
        apply(model, settings.before[step])
        losses = losses_of(model, oracle, step)
        comparison.tensor(f"step {step}: loss", *losses)
        apply(model, settings.between[step])
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
        step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


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
