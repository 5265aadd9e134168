"""PURE: where every element lies: shards of one parameter, parameters of one flat bucket.

Pure arithmetic on integers. A layout is planned once, checked once, and then replayed every step.

One parameter, 5 rows over 2 shards of 3 rows (ceil division), one row of padding at the end::

    rank 0   | r0 r1 r2 |            gathered   | r0 r1 r2 | r3 r4 -- |
    rank 1   | r3 r4 -- |                         the first 5 rows are the parameter

One bucket, big parameters A and B and small ones c, d, over 2 shards::

    sharded (each rank)   | A_r    | B_r    | c_r d_r |
    on the wire             1 msg    1 msg    1 msg (packed)
    unsharded             | A_0 A_1 | B_0 B_1 | c_0 c_1 | d_0 d_1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

ALIGNMENT_NBYTES = 64
"""Parameters that travel in their own message start at a multiple of this many bytes."""

PACKED_NBYTES_PER_PEER = 64 * 1024
"""What a message to one peer costs, expressed in bytes of copying; see :func:`travels_packed`."""


@dataclass(frozen=True)
class ParamLayout:
    """How a parameter of ``shape`` is cut along ``dim`` into ``num_shards`` pieces.

    Ceil division: every shard has ``rows_per_shard`` rows but the last ones, which may have fewer
    or none. A shard travels padded to ``shard_numel`` elements; its own elements come first.
    """

    shape: tuple[int, ...]
    dim: int
    num_shards: int

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"Expected a dim within {len(self.shape)} dims, got {self.dim}")
        if self.num_shards < 1:
            raise ValueError(f"Expected at least 1 shard, got {self.num_shards}")

    @cached_property
    def rows(self) -> int:
        return self.shape[self.dim]

    @cached_property
    def rows_per_shard(self) -> int:
        return -(-self.rows // self.num_shards)

    @cached_property
    def outer(self) -> int:
        """Elements of the dims before the sharded one."""
        return prod(self.shape[: self.dim])

    @cached_property
    def inner(self) -> int:
        """Elements of the dims after the sharded one."""
        return prod(self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one padded shard: what each rank contributes to the all-gather."""
        return self.outer * self.rows_per_shard * self.inner

    @cached_property
    def gathered_numel(self) -> int:
        return self.num_shards * self.shard_numel

    @cached_property
    def is_even(self) -> bool:
        return self.rows == self.rows_per_shard * self.num_shards

    @cached_property
    def gathers_in_order(self) -> bool:
        """Whether shards laid end to end are the parameter, so that no copy-out is needed."""
        return self.outer == 1 or self.num_shards == 1

    @cached_property
    def num_full_shards(self) -> int:
        return self.rows // self.rows_per_shard if self.rows else 0

    @cached_property
    def num_nonempty_shards(self) -> int:
        """Shards that have rows: the first ones."""
        return self.num_full_shards + (self.num_remaining_rows > 0)

    @cached_property
    def num_remaining_rows(self) -> int:
        """Rows of the one shard that is neither full nor empty, or 0."""
        return self.rows - self.num_full_shards * self.rows_per_shard

    def start(self, rank: int) -> int:
        return min(rank * self.rows_per_shard, self.rows)

    def local_rows(self, rank: int) -> int:
        return self.start(rank + 1) - self.start(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.local_rows(rank), *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        return self.outer * self.local_rows(rank) * self.inner


def travels_packed(layout: ParamLayout, itemsize: int) -> bool:
    """Decide whether a parameter shares a message with others and is copied out on arrival.

    A message of its own costs one latency for each peer; sharing one costs copying the parameter
    once. Packed wins while the parameter's bytes are fewer than what a latency is worth.
    """
    if layout.num_shards == 1:
        return False
    if layout.numel == 0:  # adds nothing to a shared message, whatever its order
        return True
    if not layout.gathers_in_order:
        return False
    return layout.numel * itemsize <= PACKED_NBYTES_PER_PEER * (layout.num_shards - 1)


@dataclass(frozen=True)
class BucketLayout:
    """Offsets, in elements, of parameters within the flat buffers of one bucket.

    ``direct`` parameters gather straight into place, ``permuted`` ones (sharded on an inner dim)
    and ``packed`` ones go through a staging buffer; the packed ones share one message.
    """

    params: tuple[ParamLayout, ...]
    num_shards: int
    direct: tuple[int, ...]
    permuted: tuple[int, ...]
    packed: tuple[int, ...]
    shard_offsets: tuple[int, ...]
    shard_numel: int
    packed_offset: int
    unsharded_offsets: tuple[int, ...]
    unsharded_numel: int

    def __post_init__(self) -> None:
        ranges = sorted(
            (start, start + layout.shard_numel)
            for start, layout in zip(self.shard_offsets, self.params, strict=True)
        )
        ends = [0, *(end for _, end in ranges)]
        assert all(end <= start for end, (start, _) in zip(ends, ranges, strict=False)), ranges
        assert ends[-1] <= self.shard_numel
        assert sorted(self.direct + self.permuted + self.packed) == list(range(len(self.params)))

    @cached_property
    def packed_numel(self) -> int:
        """Elements of the packed message of one rank."""
        return sum(self.params[index].shard_numel for index in self.packed)

    @cached_property
    def packed_shard_numels(self) -> list[int]:
        return [self.params[index].shard_numel for index in self.packed]

    @cached_property
    def num_packed_shards(self) -> int:
        """How many ranks have elements of packed parameters; the last ones may have padding."""
        return max((self.params[index].num_nonempty_shards for index in self.packed), default=0)

    @cached_property
    def staged_numels(self) -> list[int]:
        """Elements, from all ranks, of every message that arrives beside its place."""
        return [self.num_shards * numel for _, numel in self.messages[len(self.direct) :]]

    @cached_property
    def staging_numel(self) -> int:
        """Elements that arrive beside their place and are copied out."""
        permuted = sum(self.params[index].shard_numel for index in self.permuted)
        return self.num_shards * (permuted + self.packed_numel)

    @cached_property
    def messages(self) -> tuple[tuple[int, int], ...]:
        """``(offset, numel)`` of every message within one rank's sharded buffer, in order."""
        own = [
            (self.shard_offsets[index], self.params[index].shard_numel)
            for index in (*self.direct, *self.permuted)
        ]
        return (*own, (self.packed_offset, self.packed_numel)) if self.packed_numel else tuple(own)


@lru_cache(maxsize=4096)
def plan_bucket(params: tuple[ParamLayout, ...], num_shards: int, itemsize: int) -> BucketLayout:
    """Lay out ``params`` in the flat buffers of one bucket.

    Args:
        params: Layouts of the parameters, all cut into ``num_shards``.
        num_shards: Number of ranks that share the bucket.
        itemsize: Bytes of one element on the wire.
    """
    packed = [i for i, layout in enumerate(params) if travels_packed(layout, itemsize)]
    own = [i for i in range(len(params)) if i not in set(packed)]
    direct = [i for i in own if params[i].gathers_in_order]
    permuted = [i for i in own if not params[i].gathers_in_order]
    step = max(1, ALIGNMENT_NBYTES // itemsize)

    shard_offsets = [0] * len(params)
    end = _place(own, [params[i].shard_numel for i in own], shard_offsets, 0, step)
    packed_offset = _aligned(end, step)
    end = _place(packed, [params[i].shard_numel for i in packed], shard_offsets, packed_offset, 1)

    unsharded_offsets = [0] * len(params)
    order = [*direct, *packed, *permuted]
    numels = [params[i].numel if i in set(permuted) else params[i].gathered_numel for i in order]
    end_of_unsharded = _place(order, numels, unsharded_offsets, 0, step)
    return BucketLayout(
        params=params,
        num_shards=num_shards,
        direct=tuple(direct),
        permuted=tuple(permuted),
        packed=tuple(packed),
        shard_offsets=tuple(shard_offsets),
        shard_numel=end if packed else packed_offset,
        packed_offset=packed_offset,
        unsharded_offsets=tuple(unsharded_offsets),
        unsharded_numel=_aligned(end_of_unsharded, num_shards),  # any group can share it evenly
    )


def _aligned(offset: int, step: int) -> int:
    return -(-offset // step) * step


def _place(
    indices: Sequence[int], numels: Sequence[int], offsets: list[int], start: int, step: int
) -> int:
    """Write the offsets of ``indices`` laid end to end; return where the last one ends."""
    end = start
    for index, numel in zip(indices, numels, strict=True):
        offsets[index] = _aligned(end, step)
        end = offsets[index] + numel
    return end
