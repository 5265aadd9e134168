"""Models as users have them, and ways to shard them wrongly."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import shard_children


class MLP(nn.Module):
    """Blocks with buffers and dropout between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def mlp_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    ids = torch.randint(11, (6,))
    return nn.functional.cross_entropy(model(ids).float(), (ids + 1) % 11)


def shard_blocks(model: MLP, **options: Any) -> None:
    """Shard the blocks; the embedding and the head, being tied, belong to the root."""
    shard_children(model.blocks[0], **options)
    shard_children(model.blocks[1], **options)
    fully_shard(model, **options)


def linear() -> nn.Module:
    return nn.Linear(3, 4)


def linear_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 3)).square().mean()


# Planted bugs ---------------------------------------------------------------------------------


def hook_scales_on_rank_1(model: nn.Module, **options: Any) -> None:
    shard_children(model, **options)
    if dist.get_rank() == 1:
        model.weight.register_hook(lambda grad: grad * 1.5)


def wrong_divisor(model: Any, **options: Any) -> None:
    shard_children(model, **options)
    model.set_gradient_divide_factor(3.0)


def no_reduction_on_rank_1(model: Any, **options: Any) -> None:
    shard_children(model, **options)
    if dist.get_rank() == 1:
        model.weight.register_post_accumulate_grad_hook(lambda param: param.grad.zero_())


def stale_parameters(model: Any, **options: Any) -> None:
    """Forwards go on with the parameters that were gathered first."""
    shard_children(model, **options)
    first: list[torch.Tensor] = []

    def remember(module: Any, args: Any) -> None:
        if not first:
            first.append(module.weight.detach().clone())
        module.weight.data.copy_(first[0])

    model.register_forward_pre_hook(remember)


def zero_grad_does_nothing(model: Any, **options: Any) -> None:
    shard_children(model, **options)
    model.zero_grad = lambda set_to_none=True: None


def fails_in_the_second_forward(model: Any, **options: Any) -> None:
    shard_children(model, **options)
    counter = mock.Mock(side_effect=[None, ValueError("no second time")])
    model.register_forward_pre_hook(lambda *_: counter())


def not_sharded(model: nn.Module, **options: Any) -> None:
    pass
