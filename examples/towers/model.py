"""A text tower, a picture tower, and a head in which the text looks at the picture.

Nothing in this file knows about sharding. The caller passes a function that replaces the picture
tower for batches without pictures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lm.model import VOCABULARY, Block, FeedForward
from towers.samples import CONTEXT, SIDE

PATCH = 4  # pixels of a side
NUM_PATCHES = (SIDE // PATCH) ** 2

Skip = Callable[[nn.Module], Tensor | float]
"""A function that is called instead of a tower without input; it returns a zero."""


class TextTower(nn.Module):
    """Encode each byte from the bytes before it."""

    def __init__(self, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, CONTEXT) for _ in range(num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Convolution(nn.Module):
    """Let every patch look at its neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.up = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.out = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.relu(self.up(self.norm(x))))


class PictureTower(nn.Module):
    """Cut pictures into patches, and describe each."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.1 * torch.randn(width, SIDE // PATCH, SIDE // PATCH))
        self.blocks = nn.ModuleList(Convolution(width) for _ in range(num_layers))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures) + self.places
        for block in self.blocks:
            x = block(x)
        return rearrange(x, "batch width row column -> batch (row column) width")


class Head(nn.Module):
    """Let each byte look at the patches, and predict the next one."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.text_norm = nn.RMSNorm(width)
        self.patch_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, patches: Tensor) -> Tensor:
        heads = {"head": self.num_heads}
        query = rearrange(self.query(self.text_norm(x)), "b t (head dim) -> b head t dim", **heads)
        key, value = rearrange(
            self.key_value(self.patch_norm(patches)),
            "b patch (part head dim) -> part b head patch dim",
            part=2,
            **heads,
        )
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + self.joined(rearrange(seen, "b head t dim -> b t (head dim)"))
        return self.logits(x + self.feed_forward(self.norm(x)))


class TwoTowers(nn.Module):
    """Predict the next byte of lines; some lines have a picture.

    Args:
        num_layers: blocks of each tower.
        width: features of a byte, and of a patch; a multiple of twice ``num_heads``.
        num_heads: attention heads.
        skip: called instead of the picture tower if there are no pictures.
    """

    def __init__(self, num_layers: int, width: int, num_heads: int, skip: Skip) -> None:
        super().__init__()
        self.text = TextTower(num_layers, width, num_heads)
        self.pictures = PictureTower(num_layers, width)
        self.no_picture = nn.Parameter(0.1 * torch.randn(NUM_PATCHES, width))
        self.head = Head(width, num_heads)
        self.skip = skip

    def forward(self, tokens: Tensor, pictures: Tensor, rows: Tensor) -> Tensor:
        """Return the logits of each next byte.

        Args:
            tokens: bytes as int64, ``[batch, time]``.
            pictures: ``[num_pictures, 3, SIDE, SIDE]``.
            rows: the row of ``tokens`` for each picture, int64, ``[num_pictures]``.

        Returns:
            Logits, ``[batch, time, 256]``.
        """
        patches = self.no_picture.expand(len(tokens), -1, -1)
        if len(pictures):
            patches = patches.index_copy(0, rows, self.pictures(pictures))
        else:
            patches = patches + self.skip(self.pictures)
        return self.head(self.text(tokens), patches)
