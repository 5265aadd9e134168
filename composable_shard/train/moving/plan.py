"""PURE: which part of a tensor goes from which rank to which, when it is to lie otherwise.

A tensor of 6 rows from 3 ranks to 2; rank 0 keeps its rows and gets row 2, rank 1 gets the rest::

    before   rank 0 | r0 r1 |   rank 1 | r2 r3 |   rank 2 | r4 r5 |
    after    rank 0 | r0 r1 r2 |           rank 1 | r3 r4 r5 |

A rank that holds a whole copy together with others is given the rest of that copy; one that holds
nothing, that of whichever copy it falls to. So every rank gets each element once. What is sent is
cut into pieces, and the pieces are put into rounds in which no rank has more than a bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from composable_shard.optim.blocks import Box, Spread

COPIES_SENT = 2
"""How often a message is in memory where it is sent: a part of it by itself, and all of them."""


@dataclass(frozen=True)
class Holding:
    """How a tensor lies on ranks.

    Attributes:
        ranks: Their numbers in the job, in the order of ``spread``.
        spread: What each of them holds.
    """

    ranks: tuple[int, ...]
    spread: Spread

    def box(self, rank: int) -> Box | None:
        """Return what a rank holds; ``None`` if it is not one of them."""
        return self.spread.boxes[self.ranks.index(rank)] if rank in self.ranks else None


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that goes from a rank to another one, or stays.

    Attributes:
        tensor: Which tensor.
        source: The rank that has it.
        target: The rank that needs it.
        box: Where it lies in the tensor.
    """

    tensor: int
    source: int
    target: int
    box: Box


def pieces_of(tensor: int, before: Holding, after: Holding) -> list[Piece]:
    """Return what has to go where for a tensor to lie otherwise; every element of a rank once.

    Args:
        tensor: Its number.
        before: How it lies.
        after: How it is to lie.
    """
    copies: dict[int, list[int]] = defaultdict(list)
    for place, replica in enumerate(before.spread.replicas):
        copies[replica].append(place)
    names = sorted(copies)
    found = []
    for place, target in enumerate(after.ranks):
        wanted = after.spread.boxes[place]
        if target in before.ranks:
            copy = before.spread.replicas[before.ranks.index(target)]
        else:
            copy = names[place % len(names)]
        for source in copies[copy]:
            box = before.spread.boxes[source].overlap(wanted)
            if box.numel:
                found.append(Piece(tensor, before.ranks[source], target, box))
    return found


def cut_box(box: Box, most: int) -> Iterator[Box]:
    """Yield parts of a box of at most so many elements, which together are all of it.

    Example:
        >>> [part.sizes for part in cut_box(Box((0, 0), (5, 4)), 8)]
        [(2, 4), (2, 4), (1, 4)]
    """
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, most * box.sizes[dim] // box.numel)
    for start in range(0, box.sizes[dim], rows):
        starts, sizes = list(box.starts), list(box.sizes)
        starts[dim], sizes[dim] = starts[dim] + start, min(rows, sizes[dim] - start)
        yield from cut_box(Box(tuple(starts), tuple(sizes)), most)


def rounds_of(
    pieces: Iterable[Piece], itemsizes: Sequence[int], bucket_nbytes: int
) -> list[list[Piece]]:
    """Put what is sent into rounds in which no rank has more than a bucket of messages.

    Args:
        pieces: All that go from one rank to another.
        itemsizes: Bytes of an element, by tensor.
        bucket_nbytes: Bytes of messages, sent and received, that a rank has at a time; or those of
            one element, if that is more.
    """
    rounds: list[list[Piece]] = []
    loads: list[dict[int, int]] = []
    reached: dict[int, int] = defaultdict(int)  # by rank, the last round that has a piece of it
    for piece in pieces:
        itemsize = itemsizes[piece.tensor]
        most = max(1, bucket_nbytes // (COPIES_SENT * itemsize))
        for box in cut_box(piece.box, most):
            costs = {piece.source: COPIES_SENT * box.numel * itemsize}
            costs[piece.target] = box.numel * itemsize
            index = max(reached[rank] for rank in costs)
            while index < len(rounds) and any(
                loads[index].get(rank, 0) + cost > bucket_nbytes for rank, cost in costs.items()
            ):
                index += 1
            if index == len(rounds):
                rounds.append([])
                loads.append({})
            rounds[index].append(Piece(piece.tensor, piece.source, piece.target, box))
            for rank, cost in costs.items():
                loads[index][rank] = loads[index].get(rank, 0) + cost
                reached[rank] = index
    return rounds
