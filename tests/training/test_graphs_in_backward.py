"""Graphs that a backward comes to on unusual ways, and what a failed one leaves of earlier ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from nets import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import FSDPModule, fully_shard
from composable_shard.testing import run_ranks

WIDTH = 6


def inputs(rank: int, place: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * place + rank))


def assert_means(sharded: nn.Module, plain: nn.Module, places: list[int], output: Loss) -> None:
    """Compare the gradients with the means over ranks of those of an unsharded model."""
    ranks = dist.get_world_size()
    plain.zero_grad()
    for rank in range(ranks):
        for place in places:
            (output(plain, inputs(rank, place)) / ranks).backward()
    for (name, param), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert param.grad is not None
            torch.testing.assert_close(full(param.grad), theirs.grad)


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", model(x).square().mean())


# What a microbatch that fails leaves of those before --------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def fail_between(way: str, shape: tuple[int, ...]) -> None:
    """Let the second of three microbatches fail at the begin of its backward."""
    plain = layers()
    model = copy.deepcopy(plain)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    root = cast("FSDPModule", fully_shard(model, mesh=mesh))
    rank = dist.get_rank()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt if way == "interrupted" else ZeroDivisionError

    if way == "by hand":
        root.set_manual_backward_finalization(True)
    elif way != "finished":
        root.set_is_last_backward(False)
    loss_of(model, inputs(rank, 0)).backward()
    if way == "interrupted":
        handle = model[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(inputs(rank, 1))
        handle.remove()
    else:
        output = model(inputs(rank, 1))
        output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            output.square().mean().backward()
    if way == "open":
        root.set_is_last_backward(True)
    loss_of(model, inputs(rank, 2)).backward()
    if way == "by hand":
        root.finalize_backward()
    root.synchronize_gradients()
    assert_means(model, plain, [0, 2], loss_of)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
@pytest.mark.parametrize("way", ["open", "by hand", "interrupted", "finished"])
def test_a_failed_microbatch_takes_nothing_of_those_before(
    way: str, shape: tuple[int, ...]
) -> None:
    run_ranks(fail_between, shape[0] * shape[-1] if len(shape) > 1 else shape[0], way, shape)


def dropped() -> list[bool]:
    """Return of which layers a reset keeps the gradients: all but the last reduced are there."""
    model = layers()
    for layer in model:
        fully_shard(layer)
    root = cast("FSDPModule", fully_shard(model))
    root.set_is_last_backward(False)
    loss_of(model, inputs(dist.get_rank(), 0)).backward()
    root.reset_iter_state()
    root.set_is_last_backward(True)
    kept = [layer.weight.grad is not None for layer in model]
    model.zero_grad()
    loss_of(model, inputs(dist.get_rank(), 2)).backward()
    assert_means(model, layers(), [2], loss_of)
    return kept


def test_a_reset_drops_what_is_under_way() -> None:
    assert run_ranks(dropped, 2) == [[False, True, True, True, True]] * 2


# Parameters after a failed backward -------------------------------------------------------------


def edited_after_a_failure(at_end: bool) -> list[bool]:
    """Thaw, freeze and clear parameters by the names that the model has after the failure."""
    plain = layers()
    plain[3].weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    loss_of(model, inputs(dist.get_rank(), 0)).backward()
    model.zero_grad()
    if at_end:
        handle = model[2].weight.register_hook(fail)
    else:
        handle = model[2].register_full_backward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, inputs(dist.get_rank(), 1)).backward()
    handle.remove()
    shown = [isinstance(param, DTensor) for param in model.parameters()]
    for one in (plain, model):
        one[3].weight.requires_grad_(True)
        one[2].bias.requires_grad_(False)
        with torch.no_grad():
            one[3].bias.zero_()
        one.zero_grad()
    loss_of(model, inputs(dist.get_rank(), 2)).backward()
    assert_means(model, plain, [2], loss_of)
    return shown


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_done_to_parameters_after_a_failure_counts(ranks: int, at_end: bool) -> None:
    assert run_ranks(edited_after_a_failure, ranks, at_end) == [[True] * 10] * ranks


# Backward inside of a forward -------------------------------------------------------------------


class Inner(nn.Module):
    """Trains a layer by a loss of its own, within forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x).square().mean().backward()
        return self.head(x)


def frozen_after_its_own_backward() -> None:
    plain = Inner()
    model = copy.deepcopy(plain)
    fully_shard(model.layer)
    root = cast("FSDPModule", fully_shard(model))
    with root.no_sync():
        model(inputs(dist.get_rank(), 0))
    model.layer.weight.requires_grad_(False)
    root.synchronize_gradients()
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (plain.layer(inputs(rank, 0)).square().mean() / ranks).backward()
    for ours, theirs in zip(model.layer.parameters(), plain.layer.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_freezing_keeps_what_a_backward_inside_of_forward_has_left() -> None:
    run_ranks(frozen_after_its_own_backward, 2)


def inner_gradients_before_a_failure() -> None:
    """A forward that fails comes between another one, with a backward inside, and its own."""
    plain = Inner()
    model = copy.deepcopy(plain)
    fully_shard(model.layer)
    fully_shard(model)
    loss = loss_of(model, inputs(dist.get_rank(), 0))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.layer.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(inputs(dist.get_rank(), 1))
    handle.remove()
    loss.backward()
    ranks = dist.get_world_size()
    for rank in range(ranks):
        x = inputs(rank, 0)
        (plain.layer(x).square().mean() / ranks + loss_of(plain.head, x) / ranks).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(full(ours.grad), theirs.grad)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_forward_keeps_gradients_of_backwards_inside_of_others(ranks: int) -> None:
    run_ranks(inner_gradients_before_a_failure, ranks)
