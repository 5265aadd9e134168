"""Who looks at a message or a result as a whole finds gradients in it and zeros, nothing else.

All memory that torch hands out meanwhile is filled with what would be seen.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from nets import assert_parity, train_step, two_nets
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard
from composable_shard.core.layout import MESSAGE_COSTS, Packing
from composable_shard.testing import run_ranks
from transport.own_collectives import SummingReduceScatter

POISON = 1e30


def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
    made = torch.full(shape[0] if isinstance(shape[0], tuple) else shape, POISON)
    return made.to(**{key: options[key] for key in ("dtype", "device") if key in options})


class Watching(SummingReduceScatter):
    """Notes the largest number that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def __call__(
        self, output_tensor: Any, input_tensor: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        self.largest.append(input_tensor.abs().max().item())
        return super().__call__(output_tensor, input_tensor, *rest, **more)


def backward(layer: nn.Module) -> None:
    loss = layer(torch.ones(1, 3)).sum()
    with mock.patch.object(torch, "empty", poisoned):
        loss.backward()


def gloo_costs(packing: Packing) -> Any:
    return mock.patch.dict(MESSAGE_COSTS, gloo=packing)


def seen_by_a_reduce_scatter(packing: Packing) -> float:
    watching = Watching()
    with gloo_costs(packing):
        layer = fully_shard(nn.Linear(3, 5))
        layer.set_custom_reduce_scatter(watching)
        backward(layer)
    return max(watching.largest)


@pytest.mark.parametrize("packing", [MESSAGE_COSTS["gloo"], Packing()])
def test_a_custom_reduce_scatter_sees_no_padding(packing: Packing) -> None:
    """Neither where parameters are packed into one message nor where each has one."""
    assert run_ranks(seen_by_a_reduce_scatter, 2, packing) == [1.0] * 2


def seen_by_a_hook() -> list[float]:
    layer, largest = fully_shard(nn.Linear(3, 5)), list[float]()
    layer.set_all_reduce_hook(lambda result: largest.append(result.abs().max().item()))
    backward(layer)
    return largest


def test_a_hook_sees_no_gaps() -> None:
    assert run_ranks(seen_by_a_hook, 2) == [[1.0]] * 2


@on_ranks(3)
def test_flags_that_travel_by_themselves() -> None:
    reference, sharded = two_nets()
    with gloo_costs(Packing()):
        for step in range(2):
            for model in (reference, sharded):
                train_step(model, step, None)
            assert_parity(sharded, reference)
            for model in (reference, sharded):
                model.zero_grad()
