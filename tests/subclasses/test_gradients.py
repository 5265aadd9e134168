"""Gradients of tensor subclasses: accumulated, missing on a rank, sharded on another dim."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nets import average_gradients
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks

INPUTS = 3


class Pair:
    """A sharded model of two TwoTensor layers, and the plain layers of its inner tensors."""

    def __init__(self, outputs: int = 5, dim: int = 0, **kwargs: object) -> None:
        layers = [nn.Linear(INPUTS, outputs, bias=False) for _ in range(2)]
        self.plain = [
            [nn.Parameter(layer.weight.detach() * factor) for layer in layers] for factor in (1, -2)
        ]
        for index, layer in enumerate(layers):
            inner = [weights[index].detach().clone() for weights in self.plain]
            layer.weight = nn.Parameter(TwoTensor(*inner))
        self.model = Sum(*layers)
        self.dim = dim
        fully_shard(self.model, shard_placement_fn=lambda _: Shard(dim), **kwargs)

    def run(self, x: torch.Tensor, use: tuple[bool, bool] = (True, True)) -> None:
        """Run forward and backward of both; plain gradients are not yet averaged."""
        if not any(use):
            return
        self.model(x, use).square().sum().backward()
        for weights in self.plain:
            outs = [x @ weight.T for weight, used in zip(weights, use, strict=True) if used]
            torch.stack(outs).sum(0).square().sum().backward()

    def average(self) -> None:
        """Average the plain gradients; a rank without one counts as zero."""
        for weights in self.plain:
            for weight in weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            average_gradients(weights)

    def assert_gradients(self) -> None:
        self.model.reshard()
        for index, layer in enumerate(self.model.layers):
            grad = layer.weight.grad
            assert isinstance(grad, DTensor) and grad.placements == (Shard(self.dim),)
            for name, weights in zip(("a", "b"), self.plain, strict=True):
                own = rows_of_rank(weights[index].grad, self.dim)
                got = getattr(grad.to_local(), name)
                torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-5)


def rows_of_rank(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    chunks = tensor.detach().chunk(dist.get_world_size(), dim)
    rank = dist.get_rank()
    return chunks[rank] if rank < len(chunks) else tensor.detach().narrow(dim, 0, 0)


class Sum(nn.Module):
    """Adds up what the used ones of its layers make of the input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, use: tuple[bool, bool]) -> torch.Tensor:
        outs = [layer(x) for layer, used in zip(self.layers, use, strict=True) if used]
        return outs[0] if len(outs) == 1 else outs[0] + outs[1]


def rank_input(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, INPUTS, generator=generator)


def with_or_without_hooks(fn: Callable[..., None], with_hooks: bool, *args: object) -> None:
    with two_tensor_hooks() if with_hooks else contextlib.nullcontext():
        fn(*args)


both = pytest.mark.parametrize("with_hooks", [True, False])


def accumulated(reduce_dtype: torch.dtype | None) -> None:
    pair = Pair(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with pair.model.no_sync():
        for step in range(2):
            pair.run(rank_input(step))
    pair.model.reshard()
    for layer, plain in zip(pair.model.layers, pair.plain[0], strict=True):
        grad = layer.weight.grad
        if dist.get_world_size() > 1:  # on one rank nothing is left to reduce
            assert grad.placements[0].is_partial()
            assert grad.dtype == (reduce_dtype or torch.float32)
        torch.testing.assert_close(grad.to_local().a.float(), plain.grad, rtol=1e-5, atol=1e-5)
    pair.run(rank_input(2))
    pair.average()
    pair.assert_gradients()
    pair.model.zero_grad()
    assert all(param.grad is None for param in pair.model.parameters())


@both
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_accumulation_without_sync(
    with_hooks: bool, reduce_dtype: torch.dtype | None, num_ranks: int
) -> None:
    run_ranks(with_or_without_hooks, num_ranks, accumulated, with_hooks, reduce_dtype)


def used_by_some(uses: tuple[tuple[bool, bool], ...]) -> None:
    """Each rank uses other layers; a missing gradient counts as zero."""
    pair = Pair()
    for step in range(2):
        pair.run(rank_input(step), uses[dist.get_rank()])
    pair.average()
    pair.assert_gradients()


@both
@pytest.mark.parametrize(
    "uses", [((True, False), (False, True)), ((True, True), (True, False))], ids=["other", "fewer"]
)
def test_ranks_that_use_different_parameters(
    with_hooks: bool, uses: tuple[tuple[bool, bool], ...]
) -> None:
    run_ranks(with_or_without_hooks, 2, used_by_some, with_hooks, uses)


def used_by_none() -> None:
    pair = Pair()
    pair.run(rank_input(), (False, True))
    pair.model.reshard()
    first, second = (layer.weight.grad for layer in pair.model.layers)
    assert first is None and second is not None
    pair.run(rank_input(1), (True, True))
    pair.average()
    pair.assert_gradients()


@both
def test_a_parameter_that_no_rank_uses_has_no_gradient(with_hooks: bool) -> None:
    run_ranks(with_or_without_hooks, 2, used_by_none, with_hooks)


def on_columns() -> None:
    pair = Pair(outputs=4, dim=1)
    for step in range(2):
        pair.run(rank_input(step))
    pair.average()
    pair.assert_gradients()


@both
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sharded_on_columns(with_hooks: bool, num_ranks: int) -> None:
    run_ranks(with_or_without_hooks, num_ranks, on_columns, with_hooks)


def frozen() -> None:
    """A frozen subclass beside a trained one, unfrozen later."""
    pair = Pair()
    first = pair.model.layers[0].weight.requires_grad_(False)
    pair.run(rank_input())
    pair.model.reshard()
    assert pair.model.layers[0].weight.grad is None
    first.requires_grad_(True)
    pair.model.zero_grad()
    for weights in pair.plain:
        for weight in weights:
            weight.grad = None
    pair.run(rank_input(1))
    pair.average()
    pair.assert_gradients()


@both
def test_frozen_and_unfrozen_later(with_hooks: bool) -> None:
    run_ranks(with_or_without_hooks, 2, frozen, with_hooks)


def loaded() -> None:
    """Load another model's state; what is gathered next is the loaded weight."""
    source, target = Pair(), Pair()
    target.run(rank_input())
    target.model.zero_grad()
    source.model.layers[0].weight.to_local().a.mul_(3)
    source.plain[0][0].data.mul_(3)
    state = source.model.state_dict()
    assert all(isinstance(tensor.to_local(), TwoTensor) for tensor in state.values())
    target.model.load_state_dict(state)
    out = target.model(rank_input(1), (True, True))
    for got, weights in zip((out.a, out.b), source.plain, strict=True):
        expected = sum(rank_input(1) @ weight.T for weight in weights)
        torch.testing.assert_close(got, expected)


@both
def test_state_dicts(with_hooks: bool) -> None:
    run_ranks(with_or_without_hooks, 2, loaded, with_hooks)
