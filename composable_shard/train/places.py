"""The current and the new ranks of a model's tensors, and the part of each rank.

A tensor of 6 rows from 3 ranks to 2; rank 0 keeps its rows and gets row 2, rank 1 gets the rest::

    before   rank 0 | r0 r1 |   rank 1 | r2 r3 |   rank 2 | r4 r5 |
    after    rank 0 | r0 r1 r2 |           rank 1 | r3 r4 r5 |

A rank that shares a copy with other ranks receives the rest from that copy; a rank that holds
nothing is assigned a copy. So every rank gets each element once. The parts to send are cut into
pieces, and the pieces into rounds in which no rank has more than a bucket.

Each rank sends its own location to the others, in numbers: a rank outside of a mesh, or in another
part of it, has neither its process groups nor its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist

from composable_shard.core.placement import ParamPlacement, Role
from composable_shard.errors import ShardError
from composable_shard.optim.blocks import Box, Spread, spread_over

# PURE: which part of a tensor goes from which rank to which ---------------------------------------

COPIES_SENT = 2  # of a message on the sending rank: each part alone, and all parts together


class Piece(NamedTuple):
    """A part of a tensor that moves from one rank to another, or stays.

    Attributes:
        tensor: The index of the tensor.
        source: The rank that has it.
        target: The rank that needs it.
        box: Its range in the tensor.
    """

    tensor: int
    source: int
    target: int
    box: Box


def cut_box(box: Box, most: int) -> Iterator[Box]:
    """Yield parts of a box with at most ``most`` elements each, which together form the box.

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
    """Put pieces into rounds in which no rank has more than a bucket of messages.

    Args:
        pieces: All pieces that move from one rank to another.
        itemsizes: Bytes of an element, by tensor.
        bucket_nbytes: Bytes of messages, sent and received, that a rank has at a time; at least one
            element.
    """
    rounds: list[list[Piece]] = [[]]
    loads = Counter[int]()  # bytes of the last round, by rank
    for piece in pieces:
        itemsize = itemsizes[piece.tensor]
        most = max(1, bucket_nbytes // (COPIES_SENT * itemsize))
        for box in cut_box(piece.box, most):
            nbytes = box.numel * itemsize
            costs = {piece.source: COPIES_SENT * nbytes, piece.target: nbytes}
            if any(loads[rank] + cost > bucket_nbytes for rank, cost in costs.items()):
                rounds.append([])
                loads.clear()
            rounds[-1].append(piece._replace(box=box))
            loads.update(costs)
    return [some for some in rounds if some]


# The part of a tensor on each rank ----------------------------------------------------------------


class Ground(NamedTuple):
    """The ranks of a tensor, and the roles of the axes of their mesh.

    Attributes:
        ranks: Their global ranks; the last axis varies fastest.
        extents: The number of ranks along each axis.
        roles: The role of each axis: shard or replicate.
    """

    ranks: tuple[int, ...]
    extents: tuple[int, ...]
    roles: tuple[Role, ...]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, placement: ParamPlacement) -> Ground:
        """Return the ranks of a parameter; the same object each time, so that it is pickled once.

        Raises:
            ShardError: If the ranks do not ascend: process groups sort their ranks, so the real
                layout would differ from the mesh.
        """
        mesh, ranks = placement.mesh, placement.mesh.mesh
        if not all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.ndim)):
            raise ShardError(
                f"Expected a mesh of ascending ranks, got {ranks.tolist()}; save a checkpoint"
            )
        roles = tuple(role for _, role in placement.axes)
        return cls(tuple(ranks.flatten().tolist()), tuple(mesh.shape), roles)

    def spread(self, shape: Sequence[int], dim: int | None) -> Spread:
        """Return the parts of a tensor that is sharded on a dim, or on none, by rank."""
        over = tuple(dim if role == "shard" else None for role in self.roles)
        return spread_over(tuple(shape), self.extents, over)

    def box(self, shape: Sequence[int], dim: int | None) -> Box:
        """Return this rank's part of a tensor that is sharded on a dim, or on none."""
        return self.spread(shape, dim).boxes[self.ranks.index(dist.get_rank())]


def pieces_of(
    tensor: int, shape: Sequence[int], dim: int | None, before: Ground, after: Ground
) -> list[Piece]:
    """Return the pieces that move a tensor to other ranks; each rank gets every element once.

    Args:
        tensor: Its index.
        shape: Its shape.
        dim: The sharded dim; ``None`` if it is not sharded.
        before: Its current ranks.
        after: Its new ranks.
    """
    have, want = before.spread(shape, dim), after.spread(shape, dim)
    places = {rank: place for place, rank in enumerate(before.ranks)}
    num_copies, found = max(have.replicas) + 1, list[Piece]()
    for number, (target, wanted) in enumerate(zip(after.ranks, want.boxes, strict=True)):
        copy = have.replicas[places[target]] if target in places else number % num_copies
        for place, part in have.parts(wanted).items():
            if have.replicas[place] == copy:
                found.append(Piece(tensor, before.ranks[place], target, part))
    return found
