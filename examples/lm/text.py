"""The text to learn from, and the batch of each rank and step.

The batch of a rank depends only on the seed, the step and the rank. So a resumed run sees the same
batches, and a checkpoint need not contain the position of an iterator.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PIECE_NBYTES = 4096
HELD_OUT_EVERY = 10
NO_TARGET = -1  # marks positions that the loss ignores


@dataclass(frozen=True)
class Text:
    """A text in bytes, split into a training part and a held-out part.

    Attributes:
        train: uint8, ``[num_train]``.
        held_out: uint8, ``[num_held_out]``: every tenth piece of 4 KiB.
        digest: of the whole text, so that a resumed run can check that it is the same.
    """

    train: Tensor
    held_out: Tensor
    digest: str

    @classmethod
    def from_bytes(cls, content: bytes, context: int) -> Text:
        """Split a text.

        Args:
            content: the whole text.
            context: bytes in a window; both parts must be longer than that.

        Raises:
            ValueError: the text is too short.
        """
        shortest = HELD_OUT_EVERY * PIECE_NBYTES + context
        if len(content) < shortest:
            raise ValueError(
                f"Expected a text of at least {shortest} bytes, got {len(content)}: "
                "give a longer one with --text"
            )
        pieces = torch.frombuffer(bytearray(content), dtype=torch.uint8).split(PIECE_NBYTES)
        held_out = pieces[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [piece for i, piece in enumerate(pieces, start=1) if i % HELD_OUT_EVERY]
        digest = hashlib.sha256(content).hexdigest()
        return cls(torch.cat(train), torch.cat(held_out), digest)


def load_text(path: Path | None, context: int) -> Text:
    """Read a file, or by default the documentation that ships with Python."""
    return Text.from_bytes(path.read_bytes() if path else python_documentation(), context)


def python_documentation() -> bytes:
    """Return the reference documentation that ``help()`` shows, as one text.

    Its topics repeat whole paragraphs of each other. Each paragraph is kept once, or training would
    see the held-out text.
    """
    from pydoc_data.topics import topics  # half a megabyte: read only if it is used

    paragraphs = (
        paragraph
        for name in sorted(topics)
        for paragraph in re.split(r"\n\s*\n", topics[name].strip())
    )
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def training_batch(
    train: Tensor, context: int, rows: range, num_rows: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the batch of a step.

    All ranks draw the whole batch and take their rows, so the batch does not depend on the number
    of ranks.

    Args:
        train: uint8, ``[num_train]``.
        context: bytes in a row.
        rows: this rank's rows of the batch.
        num_rows: rows of the whole batch.
        seed: seed of the run.
        step: from 0.

    Returns:
        Inputs and targets, int64, ``[len(rows), context]`` each.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(train) - context, (num_rows, 1), generator=generator)
    windows = train[starts[rows.start : rows.stop] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def held_out_batches(
    held_out: Tensor, context: int, num_rows: int, rank: int, num_ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of the held-out text, in the same number of batches on every rank.

    All ranks must run the same number of forwards, because each forward gathers. So ranks with a
    smaller share add rows that the loss ignores.

    Args:
        held_out: uint8, ``[num_held_out]``.
        context: bytes in a row.
        num_rows: rows of a batch, at most.
        rank: this rank.
        num_ranks: number of ranks that share the text.

    Yields:
        Inputs and targets, int64, ``[rows, context]`` each; ignored targets are ``NO_TARGET``.
    """
    num_windows = -(-(len(held_out) - 1) // context)
    num_windows = -(-num_windows // num_ranks) * num_ranks
    inputs = torch.zeros(num_windows * context, dtype=torch.int64)
    targets = torch.full_like(inputs, NO_TARGET)
    inputs[: len(held_out) - 1] = held_out[:-1].long()
    targets[: len(held_out) - 1] = held_out[1:].long()
    mine = (t.view(-1, context)[rank::num_ranks].split(num_rows) for t in (inputs, targets))
    yield from zip(*mine, strict=True)
