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

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Literal

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
        mine = map(sum, zip(self.starts, self.sizes, strict=True))
        theirs = map(sum, zip(other.starts, other.sizes, strict=True))
        stops = map(min, mine, theirs)
        sizes = tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes)

    def within(self, outer: Box) -> Box:
        """Return this box relative to ``outer``, which contains it."""
        starts = (start - begin for start, begin in zip(self.starts, outer.starts, strict=True))
        return Box(tuple(starts), self.sizes)


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
    sizes = [rows] if split_sizes is None else list(split_sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        Box((*place, start, 0), (*(1 for _ in stack), size, columns))
        for place in product(*map(range, stack))
        for start, size in zip(starts, sizes, strict=True)
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

    def sources(self, owner: int) -> list[int]:
        """Return the ranks of the same copy as ``owner``; together they hold the tensor once."""
        return [rank for rank, r in enumerate(self.replicas) if r == self.replicas[owner]]

    @lru_cache(maxsize=1024)  # noqa: B019
    def parts(self, box: Box) -> Mapping[int, Box]:
        """Return the part of a box that each rank holds, without ranks that hold nothing."""
        overlaps = {rank: held.overlap(box) for rank, held in enumerate(self.boxes)}
        return {rank: part for rank, part in overlaps.items() if part.numel}

    def whole_on(self, box: Box) -> list[int]:
        """Return the ranks that hold all of a box."""
        return [rank for rank, part in self.parts(box).items() if part.numel == box.numel]


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


@dataclass(frozen=True)
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
    def key(self) -> tuple[int, int]:
        """The numbers of its parameter and of the block in it."""
        return self.param, self.number

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that an optimizer sees; for a stack, that of one matrix."""
        return self.box.sizes[-2:]

    @property
    def cost(self) -> int:
        """The cost of multiplying the matrix by itself, up to a factor."""
        return self.box.numel * min(self.shape, default=1)

    @property
    def candidates(self) -> Sequence[int]:
        """The ranks that hold the whole block, if there are any; else all ranks."""
        return self.spread.whole_on(self.box) or range(len(self.spread.boxes))


@dataclass(frozen=True)
class Route:
    """The transfers of one block to its owner and back, from the view of one rank.

    Attributes:
        block: The block.
        rank: The rank.
        held: The range of this rank's part in the block; ``None`` if it holds nothing.
        held_locally: The range of that part in the local shard.
        sources: The other ranks that send parts to the owner, each with its part.
        holders: All other ranks that hold parts of the block, each with its part.
    """

    block: Block
    rank: int
    held: Box | None
    held_locally: Box | None
    sources: tuple[tuple[int, Box], ...]
    holders: tuple[tuple[int, Box], ...]

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        return self.rank == self.block.owner

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the block."""
        return self.held is not None and self.held.numel == self.block.box.numel

    def parts(self, *, to_owner: bool) -> tuple[tuple[int, Box], ...]:
        """Return the parts that travel in one direction, each with the rank at the other end."""
        return self.sources if to_owner else self.holders

    def own_parts(self, *, to_owner: bool) -> list[tuple[int, Box]]:
        """Return the parts that this rank sends or receives, each with the rank at its other end.

        The owner receives with ``to_owner``, and sends without.
        """
        parts = self.parts(to_owner=to_owner)
        if self.is_owner:
            return list(parts)
        return [(self.block.owner, part) for rank, part in parts if rank == self.rank]


def route_of(block: Block, rank: int) -> Route:
    """Return the transfers of a block from the view of ``rank``."""
    spread, owner = block.spread, block.owner
    parts = spread.parts(block.box)
    held, sources = parts.get(rank), spread.sources(owner)
    holders = [(peer, part.within(block.box)) for peer, part in parts.items() if peer != owner]
    return Route(
        block,
        rank,
        None if held is None else held.within(block.box),
        None if held is None else held.within(spread.boxes[rank]),
        tuple((peer, part) for peer, part in holders if peer in sources),
        tuple(holders),
    )


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


# A step: the order of its buckets, and the bytes that it sends and occupies -----------------------

Action = Literal["launch", "arrive", "compute", "finish"]


def schedule(num_buckets: int) -> Iterator[tuple[Action, int]]:
    """Yield the actions of a step, each with the index of its bucket.

    >>> " ".join(f"{action}-{index}" for action, index in schedule(2))
    'launch-0 arrive-0 launch-1 compute-0 arrive-1 finish-0 compute-1 finish-1'
    """
    for index in range(num_buckets):
        if index == 0:
            yield "launch", index
        yield "arrive", index
        if index > 0:
            yield "finish", index - 1
        if index + 1 < num_buckets:
            yield "launch", index + 1
        yield "compute", index
        if index + 1 == num_buckets:
            yield "finish", index


def padded(nbytes: int) -> int:
    """Return the bytes that a part occupies in a message: parts begin at multiples of 16."""
    return -(-nbytes // 16) * 16


@dataclass(frozen=True)
class Sent:
    """The traffic of this rank in one all-to-all.

    Attributes:
        is_launched: Whether any rank sends anything.
        to: Bytes that this rank sends to each rank.
        received: Bytes that this rank receives.
    """

    is_launched: bool
    to: Mapping[int, int]
    received: int

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends."""
        return sum(self.to.values())

    @property
    def buffers(self) -> int:
        """Bytes of both messages."""
        return self.nbytes + self.received


@dataclass(frozen=True)
class Parcel:
    """The sizes of a block in transit.

    Attributes:
        route: The transfers of the block.
        grad_itemsize: Bytes of an element of its gradient.
        is_away: Whether its shards are on another device than compute.
    """

    route: Route
    grad_itemsize: int
    is_away: bool = False

    @property
    def whole_numel(self) -> int:
        """Elements that this rank allocates for the whole block; 0 if its shard is the block."""
        is_in_place = self.route.is_whole and not self.is_away
        return self.route.block.box.numel if self.route.is_owner and not is_in_place else 0


@dataclass(frozen=True)
class BucketPlan:
    """The work of a step on one bucket if every trained parameter has a gradient.

    Attributes:
        parcels: Its blocks.
    """

    parcels: tuple[Parcel, ...]

    @property
    def to_owners(self) -> Sent:
        """Values and gradients in flight to the owners."""
        return self._sent(to_owner=True)

    @property
    def to_shards(self) -> Sent:
        """Updated values in flight to the shards."""
        return self._sent(to_owner=False)

    def _sent(self, *, to_owner: bool) -> Sent:
        to: Counter[int] = Counter()
        received = 0
        for parcel in self.parcels:
            itemsizes = [parcel.route.block.itemsize, *([parcel.grad_itemsize] if to_owner else [])]
            for peer, part in parcel.route.own_parts(to_owner=to_owner):
                nbytes = sum(padded(part.numel * itemsize) for itemsize in itemsizes)
                if parcel.route.is_owner == to_owner:
                    received += nbytes
                else:
                    to[peer] += nbytes
        is_launched = any(parcel.route.parts(to_owner=to_owner) for parcel in self.parcels)
        return Sent(is_launched, to, received)

    @property
    def sent(self) -> list[Sent]:
        """The all-to-alls of a step."""
        return [sent for sent in (self.to_owners, self.to_shards) if sent.is_launched]

    def held(self) -> dict[Action, tuple[int, int]]:
        """Return the bytes that it occupies: the peak during each action, and after it.

        The memory of the stock optimizer is not included.
        """
        there, back = self.to_owners, self.to_shards
        values = sum(one.whole_numel * one.route.block.itemsize for one in self.parcels)
        both = values + sum(one.whole_numel * one.grad_itemsize for one in self.parcels)
        return {
            "launch": (there.buffers, there.buffers),
            "arrive": (max(there.buffers, there.received + both), both),
            "compute": (max(both, values + back.buffers), back.buffers),
            "finish": (back.buffers, 0),
        }


def most_held(buckets: Sequence[BucketPlan]) -> int:
    """Return the peak of the bytes that the buckets of a step occupy."""
    each = [bucket.held() for bucket in buckets]
    now, most = [0] * len(buckets), 0
    for action, index in schedule(len(buckets)):
        during, after = each[index][action]
        most = max(most, sum(now) - now[index] + during)
        now[index] = after
    return most


@dataclass(frozen=True)
class GroupSteps:
    """The work of a step on one parameter group, on one rank.

    Attributes:
        layout: The name of its layout.
        num_params: The number of trained parameters.
        numel: Their elements.
        num_tensors: The number of tensors that the stock optimizer steps on this rank.
        buckets: The buckets, for blocks with owners.
    """

    layout: str
    num_params: int
    numel: int
    num_tensors: int
    buckets: tuple[BucketPlan, ...] = ()


@dataclass(frozen=True)
class LayoutSteps:
    """The work of a step of whole matrices and shards, on one rank.

    Attributes:
        groups: By parameter group.
        loads: For each mesh, the cost of the matrices that each of its ranks owns.
    """

    groups: tuple[GroupSteps, ...]
    loads: Sequence[Sequence[int]]

    @property
    def most_held(self) -> int:
        """The peak of the bytes that buckets occupy."""
        return most_held([bucket for group in self.groups for bucket in group.buckets])

    @property
    def imbalance(self) -> float:
        """The largest work of a rank, divided by the mean; 1 is best."""
        return max(
            (max(load) * len(load) / sum(load) for load in self.loads if any(load)), default=1.0
        )
