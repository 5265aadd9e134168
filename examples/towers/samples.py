"""Generated samples: pictures with captions, and sums.

A document has samples of one kind: it is an album of pictures or a sheet of sums. So, as with real
data, a batch may contain no picture.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 16  # pixels
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}
SHAPES = {  # 6 by 6 pixels
    "square": ("######", "#    #", "#    #", "#    #", "#    #", "######"),
    "cross": ("#    #", " #  # ", "  ##  ", "  ##  ", " #  # ", "#    #"),
    "disc": (" #### ", "######", "######", "######", "######", " #### "),
}
PLACES = {"top left": (1, 1), "top right": (1, 9), "bottom left": (9, 1), "bottom right": (9, 9)}
SHARE_WITHOUT_PICTURE = 1 / 8  # of the captions in albums
END = "\n"
CONTEXT = 4 * len("green square bottom right, ")  # bytes of the longest caption and its newline
NO_TARGET = -1  # marks positions that the loss ignores


@dataclass(frozen=True)
class Sample:
    """A line of text and its picture.

    Attributes:
        text: ASCII, without the newline at its end.
        picture: ``[3, SIDE, SIDE]``, or ``None``.
    """

    text: str
    picture: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of bytes to predict: the text and a newline."""
        return len(self.text) + 1


Document = list[Sample]


def draw_documents(count: int, seed: int) -> list[Document]:
    """Draw albums and sheets."""
    source = random.Random(seed)
    return [
        draw_album(source) if source.random() < 0.7 else draw_sheet(source) for _ in range(count)
    ]


def draw_album(source: random.Random) -> Document:
    """Draw up to a dozen captions; most of them have a picture."""
    samples = [draw_scene(source) for _ in range(source.randint(1, 12))]
    return [Sample(s.text) if source.random() < SHARE_WITHOUT_PICTURE else s for s in samples]


def draw_scene(source: random.Random) -> Sample:
    """Draw a picture of one to four things, and a caption with their shapes and places."""
    noise = torch.Generator().manual_seed(source.getrandbits(32))
    picture = 0.2 * torch.randn(3, SIDE, SIDE, generator=noise)
    said = []
    number = source.randint(1, len(PLACES))
    for place in sorted(source.sample(list(PLACES), number), key=list(PLACES).index):
        colour, shape = source.choice(list(COLOURS)), source.choice(list(SHAPES))
        top, left = PLACES[place]
        mask = torch.tensor([[pixel == "#" for pixel in row] for row in SHAPES[shape]])
        thing = torch.tensor(COLOURS[colour])[:, None, None] * mask
        picture[:, top : top + len(mask), left : left + len(mask)] += thing
        said.append(f"{colour} {shape} {place}")
    return Sample(", ".join(said), picture)


def draw_sheet(source: random.Random) -> Document:
    """Draw some tens of sums."""
    pairs = [(source.randint(0, 9), source.randint(0, 9)) for _ in range(source.randint(20, 60))]
    return [Sample(f"{left} + {right} = {left + right}") for left, right in pairs]


def batches_of_rank(
    documents: Sequence[Document], rank: int, num_ranks: int, epoch: int, max_tokens: int
) -> list[list[Sample]]:
    """Return the batches of a rank in an epoch: its share of the documents, in a new order.

    A batch has as many samples as ``max_tokens`` allow, but at least one. So batches have different
    numbers of samples and tokens, and ranks have different numbers of batches.
    """
    order = list(documents)
    random.Random(epoch).shuffle(order)
    batches: list[list[Sample]] = [[]]
    room = max_tokens
    for sample in (sample for document in order[rank::num_ranks] for sample in document):
        if batches[-1] and sample.num_tokens > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(sample)
        room -= sample.num_tokens
    return [batch for batch in batches if batch]


@dataclass(frozen=True)
class Batch:
    """Samples as tensors, padded at their ends.

    Attributes:
        inputs: Bytes, with a newline before each line; int64, ``[batch, time]``.
        targets: The next bytes, or ``NO_TARGET``; int64, ``[batch, time]``.
        num_tokens: Number of targets.
        pictures: ``[num_pictures, 3, SIDE, SIDE]``.
        rows: The sample of each picture; int64, ``[num_pictures]``.
    """

    inputs: Tensor
    targets: Tensor
    num_tokens: int
    pictures: Tensor
    rows: Tensor


def collate(samples: Sequence[Sample], device: torch.device, dtype: torch.dtype) -> Batch:
    """Turn samples into tensors; pictures get ``dtype``."""
    longest = max(sample.num_tokens for sample in samples)
    inputs = torch.full((len(samples), longest), ord(END))
    targets = torch.full((len(samples), longest), NO_TARGET)
    for row, sample in enumerate(samples):
        line = torch.tensor(list(f"{END}{sample.text}{END}".encode()))
        inputs[row, : len(line) - 1] = line[:-1]
        targets[row, : len(line) - 1] = line[1:]
    there = [(row, s.picture) for row, s in enumerate(samples) if s.picture is not None]
    pictures = torch.stack([p for _, p in there]) if there else torch.empty(0, 3, SIDE, SIDE)
    return Batch(
        inputs.to(device),
        targets.to(device),
        sum(sample.num_tokens for sample in samples),
        pictures.to(device, dtype),
        torch.tensor([row for row, _ in there], dtype=torch.int64, device=device),
    )
