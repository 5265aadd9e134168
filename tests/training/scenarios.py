"""A stack of blocks, and the groups that it is sharded in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from training.trees import WIDTH

# Models -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Stack(nn.Module):
    """Three blocks between a parameter and a head of the root's own."""

    def __init__(self, blocks: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STACK_GROUPS = ("blocks.0", "blocks.1", "blocks.2", "")


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()
