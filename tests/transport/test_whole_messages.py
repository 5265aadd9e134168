"""Who looks at a message or a result as a whole finds gradients in it and zeros, nothing else.

All memory that torch hands out meanwhile is filled with what would be seen.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from composable_shard import explain, fully_shard
from composable_shard.core.transport.channel import Channel
from transport.own_collectives import SummingReduceScatter

POISON = 1e30


def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
    made = torch.full(shape[0] if isinstance(shape[0], tuple) else shape, POISON)
    return made.to(**{key: options[key] for key in ("dtype", "device") if key in options})


class Watching(SummingReduceScatter):
    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, *rest: Any, **more: Any) -> Any:
        self.largest.append(input_tensor.abs().max().item())
        return super().__call__(output_tensor, input_tensor, *rest, **more)


def backward(layer: nn.Module) -> None:
    loss = layer(torch.ones(1, 3)).sum()
    with mock.patch.object(torch, "empty", poisoned):
        loss.backward()


@pytest.mark.parametrize(("num_rows", "travels"), [(5, "packed"), (20_001, "in place")])
@on_ranks(2)
def test_a_custom_reduce_scatter_sees_no_padding(num_rows: int, travels: str) -> None:
    """Neither where parameters are packed into one message nor where each has one."""
    watching, layer = Watching(), fully_shard(nn.Linear(3, num_rows))
    seen = {param.travels for param in explain(layer).groups[0].parameters}
    layer.set_custom_reduce_scatter(watching)
    backward(layer)
    assert (max(watching.largest), seen) == (1.0, {travels})


@on_ranks(2)
def test_a_hook_sees_no_gaps() -> None:
    layer, largest = fully_shard(nn.Linear(3, 5)), list[float]()
    layer.set_all_reduce_hook(lambda result: largest.append(result.abs().max().item()))
    backward(layer)
    assert largest == [1.0]


class Many(nn.Module):
    """So many small parameters that the flags of which ranks have used them are many, too."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(2740, dtype=torch.float64).view(-1, 1)
        self.numbers = nn.ParameterList([*numbers])

    def forward(self, start: int, stop: int) -> torch.Tensor:
        return (start + 1) * torch.cat([*self.numbers[start:stop]]).square().sum()


@on_ranks(3)
def test_flags_travel_behind_packed_gradients() -> None:
    model, rank, reduce, sent = fully_shard(Many()), dist.get_rank(), Channel.reduce, []

    def note(self: Channel, outputs: Any, inputs: Any, *args: Any) -> Any:
        sent.append(len(inputs))
        return reduce(self, outputs, inputs, *args)

    for _ in range(2):
        with mock.patch.object(Channel, "reduce", note):
            model(rank, 2730 + rank).backward()
        assert sent.pop() == 1 and not sent
        for number, param in enumerate(model.numbers):
            factors = [start + 1 for start in range(3) if start <= number < 2730 + start]
            if not factors:
                assert param.grad is None
            elif param.grad.to_local().numel():
                assert param.grad.to_local().item() == 2 * number * sum(factors) / 3
        model.zero_grad()
