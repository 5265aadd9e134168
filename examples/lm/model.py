"""A small byte-level GPT: rotary attention and squared-ReLU feed-forward, each after an RMS norm.

Nothing in this file knows about sharding: the model is written for one device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

VOCABULARY = 256  # one entry for each value of a byte
ROTARY_BASE = 1000.0


class Rotary(nn.Module):
    """Turn queries and keys by an angle that grows with their position."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_dim: int, context: int) -> None:
        super().__init__()
        frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(context), frequency)  # [context, head_dim / 2]
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cosine, sine = (table[: x.shape[-2]].to(x.dtype) for table in (self.cosine, self.sine))
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class Attention(nn.Module):
    """Let every position look at itself and at those before it."""

    def __init__(self, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.rotary = Rotary(width // num_heads, context)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = rearrange(
            self.qkv(x),
            "batch time (part head dim) -> part batch head time dim",
            part=3,
            head=self.num_heads,
        )
        mixed = F.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True
        )
        return self.out(rearrange(mixed, "batch head time dim -> batch time (head dim)"))


class FeedForward(nn.Module):
    """Transform each position independently."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.up(x)).square())


class Block(nn.Module):
    """One layer of the model, and the unit in which its parameters are gathered."""

    def __init__(self, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, num_heads, context)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Predict the next byte from those before it.

    Args:
        num_layers: number of blocks.
        width: features per position; a multiple of twice ``num_heads``.
        num_heads: attention heads per block.
        context: the largest number of positions in a forward.
    """

    def __init__(self, num_layers: int, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, context) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights; layers that add to the residual stream start with smaller ones."""
        residual_std = 0.02 / (2 * len(self.blocks)) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("out") else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte.

        Args:
            tokens: bytes as int64, ``[batch, time]``, ``time`` at most ``context``.

        Returns:
            Logits, ``[batch, time, 256]``.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
