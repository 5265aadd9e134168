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


# Inputs that a module writes in place ---------------------------------------------------------


class Writing(nn.Module):
    """Writes its input: once, as blocks of some networks do, or twice, reading a parameter."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "activated":
            return self.linear(nn.functional.leaky_relu_(x, 0.1))
        return self.linear(x.mul_(self.scale.detach()).mul_(self.scale.detach()))


FROZEN: dict[str, Callable[[str], bool]] = {
    "nothing": lambda _: False,
    "everything": lambda name: name.startswith("blocks"),
    "weights": lambda name: name.startswith("blocks") and name.endswith("weight"),
    "the layers": lambda name: ".linear." in name,
}


class Tower(nn.Module):
    """Writing blocks between trained layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Writing(way) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(x) * 1))


def train_written(frozen: str, way: str, reshard: bool | None) -> None:
    plain = Tower(way)
    for name, param in plain.named_parameters():
        param.requires_grad_(not FROZEN[frozen](name))
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    for place in range(2):  # the second time in the recorded order
        model.zero_grad()
        loss_of(model, inputs(dist.get_rank(), place)).backward()
        assert_means(model, plain, [place], loss_of)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("way", ["activated", "scaled"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_modules_that_write_their_inputs(frozen: str, way: str, reshard: bool | None) -> None:
    run_ranks(train_written, 2, frozen, way, reshard)


# A graph that a hook differentiates before the backward comes to its group ----------------------


class Equilibrium(nn.Module):
    """A fixed point of a layer, whose gradient a hook solves for by other gradients of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = x
            for _ in range(3):
                fixed = 0.3 * self.inner(fixed) + x
        fixed = 0.3 * self.inner(fixed) + x
        start = fixed.detach().requires_grad_()
        again = 0.3 * self.inner(start)

        def solve(grad: torch.Tensor) -> torch.Tensor:
            solved = grad
            for _ in range(3):
                (through,) = torch.autograd.grad(again, start, solved, retain_graph=True)
                solved = through + grad
            return solved

        fixed.register_hook(solve)
        return self.head(fixed)


def train_equilibrium(is_frozen: bool, reshard: bool | None) -> None:
    plain = Equilibrium()
    plain.inner.requires_grad_(not is_frozen)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x.requires_grad_())

    model = copy.deepcopy(plain)
    fully_shard(model.inner, reshard_after_forward=reshard)
    fully_shard(model)
    for place in range(2):
        model.zero_grad()
        loss(model, inputs(dist.get_rank(), place)).backward()
        assert_means(model, plain, [place], loss)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_hook_may_differentiate_another_graph_first(
    ranks: int, is_frozen: bool, reshard: bool | None
) -> None:
    run_ranks(train_equilibrium, ranks, is_frozen, reshard)


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


class Probing(nn.Module):
    """Differentiates a layer by an input within forward, then calls it twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(probe).sum(), probe)
        return self.head(self.layer(self.layer(x)) * slope)


def train_probing(is_frozen: bool, reshard: bool | None) -> None:
    plain = Probing()
    plain.layer.requires_grad_(not is_frozen)
    model = copy.deepcopy(plain)
    fully_shard(model.layer, reshard_after_forward=reshard)
    fully_shard(model)
    for place in range(2):
        model.zero_grad()
        x, y = (inputs(dist.get_rank(), place).requires_grad_() for _ in range(2))
        (ours,) = torch.autograd.grad(loss_of(model, x), x)
        (theirs,) = torch.autograd.grad(loss_of(plain, y), y)
        torch.testing.assert_close(ours, theirs)
        loss_of(model, x).backward()
        assert_means(model, plain, [place], loss_of)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_that_was_differentiated_within_forward(
    is_frozen: bool, reshard: bool | None
) -> None:
    run_ranks(train_probing, 2, is_frozen, reshard)


class Branches(nn.Module):
    """Calls a layer for an output and once more for a gradient within forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.first, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        left = self.left(x)
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.left(probe).sum(), probe)
        return left * slope, self.right(x)


def one_branch_each() -> None:
    """Each rank's loss is made of another output."""
    plain = Branches()
    model = copy.deepcopy(plain)
    for layer in (model.first, model.left, model.right, model):
        fully_shard(layer)
    for place in range(2):
        model.zero_grad()
        rank = dist.get_rank()
        model(inputs(rank, place))[rank].square().mean().backward()
        plain.zero_grad()
        for other in range(2):
            (plain(inputs(other, place))[other].square().mean() / 2).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_ranks_whose_losses_reach_other_calls_of_a_differentiated_layer() -> None:
    run_ranks(one_branch_each, 2, timeout=30)


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
