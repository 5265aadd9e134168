"""Dtypes that users ask of gradients: one by one, again and again."""

from __future__ import annotations

import weakref
from unittest import mock

import torch
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.core.grads import unreduced
from composable_shard.testing import fake_ranks


def train(layer: nn.Module) -> list[torch.dtype | None]:
    layer(torch.ones(2, 4)).sum().backward()
    return [None if param.grad is None else param.grad.dtype for param in layer.parameters()]


def test_parameters_of_a_group_may_ask_for_different_ones() -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, grad_dtype=torch.float64)
    with fake_ranks(2):
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(layer.weight.detach().bfloat16())
        layer.weight.grad_dtype = torch.float32
        assert train(fully_shard(layer, mp_policy=policy)) == [torch.float32, torch.float64]


def test_what_is_asked_may_change() -> None:
    with fake_ranks(2):
        layer = fully_shard(nn.Linear(4, 4))
        for dtype in (torch.float64, torch.bfloat16, torch.float64):
            layer.bias.grad_dtype = dtype
            assert train(layer) == [torch.float32, dtype]
            layer.zero_grad()


def test_what_is_asked_after_an_accumulation_holds() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    with fake_ranks(2):
        layer = fully_shard(nn.Linear(4, 4).bfloat16(), mp_policy=policy)
        for asked in (None, torch.float64):
            if asked is not None:
                layer.weight.grad_dtype = layer.bias.grad_dtype = asked
            x = torch.ones(2, 4, dtype=torch.bfloat16)
            with layer.no_sync():
                layer(x).sum().backward()
            layer(x).sum().backward()
            grads = [param.grad for param in layer.parameters()]
            assert [g.dtype for g in grads if g is not None] == [asked or torch.bfloat16] * 2
            layer.zero_grad()


def test_gradients_that_accumulate_are_freed_one_by_one() -> None:
    grads: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    accumulate, put = unreduced.UnreducedGradients.accumulate, unreduced.set_unreduced

    def note(self: unreduced.UnreducedGradients) -> None:
        grads.extend(
            weakref.ref(param.unsharded.grad)
            for param in self._params
            if param.unsharded is not None and param.unsharded.grad is not None
        )
        accumulate(self)

    def count(param: object, total: torch.Tensor) -> None:
        put(param, total)  # type: ignore[arg-type]
        alive.append(sum(grad() is not None for grad in grads))

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with (
        fake_ranks(2),
        mock.patch.object(unreduced, "set_unreduced", count),
        mock.patch.object(unreduced.UnreducedGradients, "accumulate", note),
    ):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        fully_shard(model, mp_policy=policy)
        with model.no_sync():
            model(torch.ones(2, 4)).float().sum().backward()
    assert alive == [3, 2, 1]
