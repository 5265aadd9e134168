"""Forwards without gradients: nothing grows, nothing stays gathered, no weights are stale."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import (
    Net,
    assert_parity,
    assert_same,
    average_gradients,
    full,
    own_input,
    shard_net,
    train_step,
    two_nets,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

CONTAINERS = (list, dict, set, collections.deque, tuple)


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the length of every container that the library or autograd hangs on a model."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if id(value) in seen or isinstance(value, torch.Tensor):
            return
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            sizes[path] = len(value)
            children = value.values() if isinstance(value, dict) else value
            for index, child in enumerate(list(children)):
                visit(child, f"{path}[{index}]")
        elif type(value).__module__.startswith("composable_shard"):
            names = [n for kind in type(value).__mro__ for n in kind.__dict__.get("__slots__", ())]
            for name in [*vars(value), *names] if hasattr(value, "__dict__") else names:
                visit(getattr(value, name), f"{path}.{name}")

    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            visit(value, f"{name}.{attribute}")
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                visit(getattr(hook, "__self__", None), f"{name} {hook}")
    for name, param in model.named_parameters():
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            sizes[f"{name}.{hooks}"] = len(getattr(param, hooks) or ())
    return sizes


class Storing(Net):
    """Keeps something of every forward, and calls a block twice."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        self.kept = x
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def growth(context: Callable[[], Any], reshard: bool | None, trains: bool) -> dict[str, Any]:
    _, model = two_nets(2, make=Storing, reshard_after_forward=reshard)
    if trains:
        train_step(model, 0, None)
    counts = []
    for num_forwards in (3, 50):
        for step in range(num_forwards):
            with context():
                model(own_input(step))
        counts.append(sizes_of(model))
    assert len(counts[0]) > 60  # it did find them
    return {path: (size, counts[1].get(path)) for path, size in counts[0].items()} | {
        path: (counts[0].get(path), size) for path, size in counts[1].items()
    }


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_grad_forwards_grow_nothing(context: Callable[[], Any], reshard: bool | None) -> None:
    """Neither do forwards with gradients whose results are dropped."""
    for trains in (False, True):
        for sizes in run_ranks(growth, 2, context, reshard, trains):
            assert {path: pair for path, pair in sizes.items() if pair[0] != pair[1]} == {}


# What stays gathered --------------------------------------------------------------------------


def gathered_after(context: Callable[[], Any], reshard: bool | None) -> list[str]:
    model = shard_net(Net(2), reshard_after_forward=reshard)
    for _ in range(2):
        with context():
            model(own_input())
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


ROOT = ["inp.weight", "inp.bias", "out.weight", "out.bias"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_after_a_no_grad_forward_nothing_stays(context: Callable[[], Any]) -> None:
    for reshard in (None, True, False):
        assert run_ranks(gathered_after, 2, context, reshard) == [[]] * 2
    everything = [name for name, _ in Net(2).named_parameters()]
    (kept, _) = run_ranks(gathered_after, 2, torch.enable_grad, False)
    assert sorted(kept) == sorted(everything)
    assert run_ranks(gathered_after, 2, torch.enable_grad, None) == [ROOT] * 2


def evaluate_between(reshard: bool | None) -> list[tuple[str, str]]:
    """An evaluation between forward and backward frees the root; backward gathers it again."""
    reference, model = two_nets(2, reshard_after_forward=reshard)
    for step in range(2):
        losses = []
        for one in (model, reference):
            losses.append(one(own_input(step)).square().sum())
            with torch.no_grad():
                losses.append(one(own_input(step + 5)))
        assert_same(losses[0], losses[2].detach())
        assert_same(losses[1], losses[3])
        with record_events(model, "all_gather") as recorded:
            losses[0].backward()
        losses[2].backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return sorted(recorded)


@pytest.mark.parametrize("reshard", [None, True])
def test_a_no_grad_forward_between_forward_and_backward(reshard: bool | None) -> None:
    gathered = [("all_gather", name) for name in ("", "blocks.0", "blocks.1")]
    assert run_ranks(evaluate_between, 2, reshard) == [gathered] * 2


# Weights that change without a version counter --------------------------------------------------


def averaged(update: str, context: Callable[[], Any], reshard: bool | None) -> list[bool]:
    """Average a sharded model into another one by foreach operations, and evaluate in between."""
    average = {"ema": get_ema_multi_avg_fn(0.5), "swa": get_swa_multi_avg_fn()}[update]
    reference, model = two_nets(2)
    torch.manual_seed(1)
    own = Net(2)
    plain = copy.deepcopy(own)
    ema = shard_net(own, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    exact = []
    for step in range(4):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(one, step, optimizer)
        for target, source in ((ema, model), (plain, reference)):
            params = [list(one.parameters()) for one in (target, source)]
            average(*([p.detach() for p in of] for of in params), step)
        with context():
            exact.append(torch.equal(full(ema(own_input(step))), plain(own_input(step))))
    return exact


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("update", ["ema", "swa"])
def test_foreach_updates_between_evaluations_are_seen(
    update: str, context: Callable[[], Any], ranks: int, reshard: bool | None
) -> None:
    exact = run_ranks(averaged, ranks, update, context, reshard)
    assert exact == [[True] * 4] * ranks


def kept_by_hand() -> list[bool]:
    """What stays gathered because the user says so is freed by hand when it has changed."""
    model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=False)
    sharded = model.weight
    fresh = []
    for step in range(3):
        with torch.no_grad():
            output = model(own_input(step))
            fresh.append(torch.equal(output, own_input(step) @ sharded.full_tensor().t()))
            torch._foreach_add_([sharded.detach()], 1.0)
            model.reshard()
    return fresh


def test_foreach_updates_of_parameters_that_stay_are_seen_after_a_reshard() -> None:
    assert run_ranks(kept_by_hand, 2) == [[True] * 3] * 2
