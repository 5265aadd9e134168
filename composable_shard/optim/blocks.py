"""PURE: the blocks of parameters, their owners, and the order in which a step moves them.

A block is the matrix that an optimizer sees: a whole parameter, some of its rows, or one matrix of
a stack. Each block has one owner, which receives the parts of the other ranks and sends the updated
rows back.

Two matrices of 5 rows over 2 ranks; rank 0 owns A and rank 1 owns B::

    rank 0   | A0 A1 A2 | B0 B1 B2 |   to owners   rank 0   | A0 A1 A2 A3 A4 |
    rank 1   | A3 A4    | B3 B4    |   --------->  rank 1   | B0 B1 B2 B3 B4 |
                                       <---------
                                       to shards

Everything follows from shapes and placements, so all ranks compute the same without communication.

Blocks travel in buckets; at most two are in flight. While one bucket is computed, the next is on
its way to the owners, and the previous one is back in the shards::

    to owners    | 0 |     | 1 |     | 2 |
    compute            | 0 |     | 1 |     | 2 |
    to shards                | 0 |     | 1 |     | 2 |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, product
from math import prod
from operator import add, sub
from typing import NamedTuple

# Boxes: parts of tensors --------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A range of each dim of a tensor.

    Attributes:
        starts: The first index, by dim.
        sizes: The number of indices, by dim.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box:
        """Return the intersection; its ranges may be empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = map(min, *(map(add, box.starts, box.sizes) for box in (self, other)))
        return Box(starts, tuple(max(0, size) for size in map(sub, stops, starts)))

    def within(self, outer: Box) -> Box:
        """Return this box relative to ``outer``, which contains it."""
        return Box(tuple(map(sub, self.starts, outer.starts)), self.sizes)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def blocks_of(shape: Sequence[int], split_sizes: Sequence[int] | None = None) -> list[Box]:
    """Return the blocks of a parameter: a stack of matrices, each possibly split by rows.

    Args:
        shape: [*, rows, columns]; or [n] or [], which is one block.
        split_sizes: Rows of each block of a matrix; ``None`` for one block.

    Example:
        >>> [box.sizes for box in blocks_of((2, 6, 4), split_sizes=(4, 2))]
        [(1, 4, 4), (1, 2, 4), (1, 4, 4), (1, 2, 4)]
    """
    if len(shape) < 2:
        return [whole(shape)]
    *stack, rows, columns = shape
    sizes = [rows] if split_sizes is None else split_sizes
    return [
        Box((*place, start, 0), (*(1 for _ in stack), size, columns))
        for place in product(*map(range, stack))
        for start, size in zip(accumulate((0, *sizes)), sizes, strict=False)
    ]


# The parts of each rank ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spread:
    """The parts of a tensor on the ranks of a mesh; its last axis varies fastest.

    Attributes:
        boxes: The part of each rank.
        replicas: The copy of the tensor to which each part belongs; each copy is complete.
    """

    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]

    @lru_cache(maxsize=1024)  # noqa: B019
    def parts(self, box: Box) -> Mapping[int, Box]:
        """Return the part of a box that each rank holds, without ranks that hold nothing."""
        overlaps = {rank: held.overlap(box) for rank, held in enumerate(self.boxes)}
        return {rank: part for rank, part in overlaps.items() if part.numel}


@lru_cache(maxsize=256)
def spread_over(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    dims: tuple[int | None, ...],
    inner: tuple[int, ...] = (),
) -> Spread:
    """Return the parts of a tensor on a mesh: the same object for equal arguments.

    Args:
        shape: Its global shape.
        extents: Ranks along each axis.
        dims: The dim that each axis shards, axis after axis; ``None`` where it replicates.
        inner: Axes that shard the parts left by the other axes, such as data-parallel axes under
            tensor parallelism of the same dim.

    Example:
        >>> [box.starts[0] for box in spread_over((5, 2), (2, 2), (None, 0)).boxes]
        [0, 3, 0, 3]
        >>> [box.starts[0] for box in spread_over((8, 2), (2, 2), (0, 0), inner=(0,)).boxes]
        [0, 4, 2, 6]
    """
    axes = sorted(range(len(extents)), key=lambda axis: axis in inner)
    boxes, replicas = [], []
    for coordinate in product(*map(range, extents)):
        starts, sizes, replica = [0] * len(shape), list(shape), 0
        for axis in axes:
            place, extent, dim = coordinate[axis], extents[axis], dims[axis]
            if dim is None:
                replica = replica * extent + place
                continue
            rows = -(-sizes[dim] // extent)
            start = min(place * rows, sizes[dim])
            starts[dim] += start
            sizes[dim] = min(rows, sizes[dim] - start)
        boxes.append(Box(tuple(starts), tuple(sizes)))
        replicas.append(replica)
    return Spread(tuple(boxes), tuple(replicas))


# Owners -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """A block of a parameter, and its owner.

    Attributes:
        param: The index of the parameter.
        number: The index of the block in the parameter.
        box: Its range in the parameter.
        spread: The parts of the parameter on the ranks.
        itemsize: Bytes of an element.
        owner: The rank that steps it.
    """

    param: int
    number: int
    box: Box
    spread: Spread
    itemsize: int
    owner: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that an optimizer sees; for a stack, that of one matrix."""
        return self.box.sizes[-2:]

    @property
    def cost(self) -> int:
        """The cost of multiplying the matrix by itself, up to a factor."""
        return self.box.numel * min(self.shape, default=1)

    @cached_property
    def parts(self) -> Mapping[int, Box]:
        """The range in the parameter that each rank holds, without ranks that hold nothing."""
        return self.spread.parts(self.box)

    def is_whole_on(self, rank: int) -> bool:
        """Return whether a rank holds all of the block."""
        return rank in self.parts and self.parts[rank].numel == self.box.numel

    @property
    def candidates(self) -> Sequence[int]:
        """The ranks that hold the whole block, if there are any; else all ranks."""
        return list(filter(self.is_whole_on, self.parts)) or range(len(self.spread.boxes))

    def travels(self, rank: int, *, to_owner: bool) -> bool:
        """Return whether the part of a rank travels to the owner, or from the owner to the rank.

        The owner receives only the copy of the parameter that it has a part in.
        """
        replicas = self.spread.replicas
        is_other = rank != self.owner and rank in self.parts
        return is_other and not (to_owner and replicas[rank] != replicas[self.owner])


def are_sent(blocks: Iterable[Block], *, to_owner: bool) -> bool:
    """Return whether any rank sends a part of the blocks."""
    return any(block.travels(rank, to_owner=to_owner) for block in blocks for rank in block.parts)


def messages(
    blocks: Iterable[Block], rank: int, *, to_owner: bool, sends: bool
) -> dict[int, list[tuple[int, Box]]]:
    """Return the parts that a rank sends to, or receives from, each other rank.

    Args:
        blocks: The blocks that travel.
        rank: The rank.
        to_owner: Whether they travel to their owners, or back to the shards.
        sends: Whether to return the parts that ``rank`` sends.

    Returns:
        For each other rank, the index of each block, and its range in the parameter.
    """
    found = defaultdict[int, list[tuple[int, Box]]](list)
    for index, block in enumerate(blocks):
        is_owner = block.owner == rank
        if sends == (is_owner != to_owner):
            for holder in block.parts if is_owner else [rank]:
                if block.travels(holder, to_owner=to_owner):
                    found[holder if is_owner else block.owner].append((index, block.parts[holder]))
    return found


def owned_buckets(blocks: Iterable[Block], loads: list[int], nbytes: int) -> list[list[Block]]:
    """Choose the owner of each block, and cut the blocks into buckets.

    The most expensive blocks come first, so the owners of a bucket have about the same work at the
    same time. The owner is the rank with the least work so far.

    Args:
        blocks: All blocks.
        loads: The work of each rank; updated.
        nbytes: The most bytes of a bucket with several blocks.
    """
    buckets: list[list[Block]] = []
    room = 0
    for block in sorted(blocks, key=lambda block: -block.cost):
        owner = min(block.candidates, key=lambda rank: (loads[rank], rank))
        loads[owner] += block.cost
        needed = block.box.numel * block.itemsize
        if not buckets or needed > room:
            buckets.append([])
            room = nbytes
        buckets[-1].append(replace(block, owner=owner))
        room -= needed
    return buckets


# A step: the order of its buckets, and the bytes that it sends ------------------------------------


def schedule(num_buckets: int) -> list[int]:
    """Return the bucket that each action of a step belongs to.

    The actions of a bucket are: launch the exchange to the owners, receive it, compute and launch
    the exchange back to the shards, and receive that.

    >>> schedule(2)  # launch 0, receive 0, launch 1, compute 0, receive 1, finish 0, ...
    [0, 0, 1, 0, 1, 0, 1, 1]
    """
    around = ((index, index - 1, index + 1, index) for index in range(num_buckets))
    order = (0, *chain.from_iterable(around), num_buckets - 1)
    return [index for index in order if 0 <= index < num_buckets]


def padded(nbytes: int) -> int:
    """Return the bytes that a part occupies in a message: parts begin at multiples of 16."""
    return -(-nbytes // 16) * 16


class Sent(NamedTuple):
    """The traffic of a rank in one all-to-all.

    Attributes:
        launches: 1 if any rank sends anything, else 0.
        messages: The number of ranks that it sends to.
        nbytes: Bytes that it sends.
    """

    launches: int
    messages: int
    nbytes: int

    @classmethod
    def of(
        cls, blocks: Sequence[Block], itemsizes: Sequence[int], rank: int, *, to_owner: bool
    ) -> Sent:
        """Return the traffic of blocks with elements of these sizes."""
        out = messages(blocks, rank, to_owner=to_owner, sends=True).values()
        parts = (padded(p.numel * itemsizes[index]) for some in out for index, p in some)
        return cls(int(are_sent(blocks, to_owner=to_owner)), len(out), sum(parts))


class GroupSteps(NamedTuple):
    """The work of a step on one parameter group, on one rank.

    Attributes:
        layout: The name of its layout.
        num_params: The number of trained parameters.
        numel: Their elements.
        num_tensors: The number of tensors that the stock optimizer steps on this rank.
        sent: The all-to-alls of blocks with owners.
    """

    layout: str
    num_params: int
    numel: int
    num_tensors: int
    sent: Sequence[Sent] = ()
