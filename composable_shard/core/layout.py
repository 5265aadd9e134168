"""PURE: where every element lies: shards of one parameter, parameters of one flat bucket.

Pure arithmetic on integers. A layout is planned once, checked once, and then replayed every step.

One parameter, 5 rows over 2 shards of 3 rows (ceil division), one row of padding at the end::

    rank 0   | r0 r1 r2 |            gathered   | r0 r1 r2 | r3 r4 -- |
    rank 1   | r3 r4 -- |                         the first 5 rows are the parameter

One bucket, big parameters A and B and small ones c, d, over 2 shards::

    sharded (each rank)   | A_r    | B_r    | c_r - d_r - |
    on the wire             1 msg    1 msg    1 msg (packed)
    unsharded             | A_0 A_1 | B_0 B_1 | c_0 c_1 | d_0 d_1 |

The gaps (``-``) are there on devices only, whose collectives and optimizers want addresses and
messages that are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

ALIGNMENT_NBYTES = 64
"""Parameters that travel in their own message start at a multiple of this many bytes."""


# What a message costs, and how small parameters lie in one ----------------------------------------


@dataclass(frozen=True)
class Packing:
    """What a message costs beside its bytes, in bytes of copying, and how packed ones are aligned.

    Attributes:
        nbytes_per_message: What each message costs, whatever the number of peers.
        nbytes_per_peer: What it costs more for each peer.
        alignment_nbytes: Packed shards, and the messages that they share, are padded to a multiple
            of this many bytes; 1 for no padding.
    """

    nbytes_per_message: int = 0
    nbytes_per_peer: int = 0
    alignment_nbytes: int = 1

    def cost_nbytes(self, num_peers: int) -> int:
        """Return what a message to some peers costs, in bytes of copying."""
        return self.nbytes_per_message + num_peers * self.nbytes_per_peer


MESSAGE_COSTS = {
    "gloo": Packing(nbytes_per_peer=64 * 1024),
    "nccl": Packing(nbytes_per_message=1024 * 1024),
}
"""By backend. That of gloo is measured by ``benchmarks/packing.py``, that of nccl is estimated; see
``docs/design.md``."""

OTHER_COST = MESSAGE_COSTS["gloo"]
"""That of backends of which nothing is known."""

PACKED_ALIGNMENT_NBYTES = 16
"""What NCCL's widest loads and stores want, and those of fused optimizers."""


def packing_of(backend: str | None, *, is_aligned: bool) -> Packing:
    """Return how small parameters are packed that ``backend`` sends.

    Args:
        backend: Its name, ``None`` where nothing is sent.
        is_aligned: Whether packed shards are padded, as on devices.
    """
    cost = OTHER_COST if backend is None else MESSAGE_COSTS.get(backend, OTHER_COST)
    return replace(cost, alignment_nbytes=PACKED_ALIGNMENT_NBYTES) if is_aligned else cost


# One parameter ------------------------------------------------------------------------------------


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
    def lacks_rows(self) -> bool:
        """Whether some shard has no rows."""
        return self.num_nonempty_shards < self.num_shards

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


def travels_packed(layout: ParamLayout, itemsize: int, packing: Packing) -> bool:
    """Decide whether a parameter shares a message with others and is copied out on arrival.

    A message of its own costs what ``packing`` says; sharing one costs copying the parameter once.
    Packed wins while the parameter's bytes are fewer than what a message is worth.
    """
    if layout.num_shards == 1:
        return False
    if layout.numel == 0:  # adds nothing to a shared message, whatever its order
        return True
    if not layout.gathers_in_order:
        return False
    return layout.numel * itemsize <= packing.cost_nbytes(layout.num_shards - 1)


# The parameters of one bucket ---------------------------------------------------------------------


@dataclass(frozen=True)
class BucketLayout:
    """Offsets, in elements, of parameters within the flat buffers of one bucket.

    ``direct`` parameters gather straight into place, ``permuted`` ones (sharded on an inner dim)
    and ``packed`` ones go through a staging buffer; the packed ones share one message.

    Attributes:
        packing: What decided which are packed.
        alignment: Each packed shard is followed by padding up to a multiple of as many elements.
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
    packing: Packing
    alignment: int

    def __post_init__(self) -> None:
        ranges = sorted(
            (start, start + layout.shard_numel)
            for start, layout in zip(self.shard_offsets, self.params, strict=True)
        )
        ends = [0, *(end for _, end in ranges)]
        assert all(end <= start for end, (start, _) in zip(ends, ranges, strict=False)), ranges
        assert ends[-1] <= self.shard_numel
        assert sorted(self.direct + self.permuted + self.packed) == list(range(len(self.params)))

    def aligned(self, numel: int) -> int:
        """Return how many elements some take in a packed message, padding included."""
        return aligned(numel, self.alignment)

    @cached_property
    def packed_numel(self) -> int:
        """Elements of the packed message of one rank, padding included."""
        return sum(map(self.aligned, self.packed_shard_numels))

    @cached_property
    def packed_shard_numels(self) -> list[int]:
        return [self.params[index].shard_numel for index in self.packed]

    @cached_property
    def packed_paddings(self) -> list[int]:
        """Elements of the padding behind each packed shard."""
        return [self.aligned(numel) - numel for numel in self.packed_shard_numels]

    @cached_property
    def num_packed_shards(self) -> int:
        """How many ranks have elements of packed parameters; the last ones may have padding."""
        return max((self.params[index].num_nonempty_shards for index in self.packed), default=0)

    @cached_property
    def staged(self) -> list[tuple[int, int]]:
        """``(offset, numel)``, of all ranks, of every message that arrives beside its place."""
        numels = [self.num_shards * numel for _, numel in self.messages[len(self.direct) :]]
        starts, _ = end_to_end(numels, self.alignment)
        return list(zip(starts, numels, strict=True))

    @cached_property
    def dropped_numel(self) -> int:
        """Elements of the largest padding that comes with the packed message, of all ranks."""
        return self.num_packed_shards * max(self.packed_paddings, default=0)

    @cached_property
    def staging_numel(self) -> int:
        """Elements that arrive beside their place and are copied out, or dropped at the end."""
        end = sum(self.staged[-1]) if self.staged else 0
        return end + self.dropped_numel

    @cached_property
    def messages(self) -> tuple[tuple[int, int], ...]:
        """``(offset, numel)`` of every message within one rank's sharded buffer, in order."""
        own = [
            (self.shard_offsets[index], self.params[index].shard_numel)
            for index in (*self.direct, *self.permuted)
        ]
        return (*own, (self.packed_offset, self.packed_numel)) if self.packed_numel else tuple(own)

    @cached_property
    def unwritten(self) -> list[tuple[int, int]]:
        """``(start, end)`` of what of the unsharded buffer no gather needs to write."""
        spans = []
        for index, (start, param) in enumerate(
            zip(self.unsharded_offsets, self.params, strict=True)
        ):
            numel = param.gathered_numel
            if index in self.permuted:
                numel = param.numel
            elif index in self.packed:
                numel = param.num_nonempty_shards * param.shard_numel
            spans.append((start, numel))
        return gaps(spans, self.unsharded_numel)


@lru_cache(maxsize=4096)
def plan_bucket(
    params: tuple[ParamLayout, ...],
    num_shards: int,
    itemsize: int,
    packing: Packing,
    narrowest_itemsize: int | None = None,
) -> BucketLayout:
    """Lay out ``params`` in the flat buffers of one bucket.

    Args:
        params: Layouts of the parameters, all cut into ``num_shards``.
        num_shards: Number of ranks that share the bucket.
        itemsize: Bytes of one element on the wire.
        packing: Which parameters share a message, and how they are aligned.
        narrowest_itemsize: Bytes of one element in the narrowest dtype that shards are stored or
            sent in, which alignment respects; ``itemsize`` if absent.
    """
    packed = [i for i, layout in enumerate(params) if travels_packed(layout, itemsize, packing)]
    own = [i for i in range(len(params)) if i not in set(packed)]
    direct = [i for i in own if params[i].gathers_in_order]
    permuted = [i for i in own if not params[i].gathers_in_order]
    alignment = max(1, packing.alignment_nbytes // (narrowest_itemsize or itemsize))
    step = max(own_step(itemsize), alignment)

    shard_offsets = [0] * len(params)
    end = _place(own, [params[i].shard_numel for i in own], shard_offsets, 0, step)
    packed_offset = aligned(end, step)
    numels = [aligned(params[i].shard_numel, alignment) for i in packed]
    end = _place(packed, numels, shard_offsets, packed_offset, alignment)

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
        unsharded_numel=aligned(end_of_unsharded, num_shards),  # any group can share it evenly
        packing=packing,
        alignment=alignment,
    )


# Ranges of elements -------------------------------------------------------------------------------


def own_step(itemsize: int) -> int:
    """Return to a multiple of how many elements what travels in its own message is placed."""
    return max(1, ALIGNMENT_NBYTES // itemsize)


def aligned(offset: int, step: int) -> int:
    """Return the first multiple of ``step`` that is not below ``offset``."""
    return -(-offset // step) * step


def end_to_end(numels: Sequence[int], step: int) -> tuple[list[int], int]:
    """Return the starts of ranges laid end to end, multiples of ``step``, and where they end."""
    starts = [0] * len(numels)
    end = _place(range(len(numels)), numels, starts, 0, step)
    return starts, end


def gaps(spans: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the ranges below ``end`` that lie in no span of a start and a number of elements."""
    taken = sorted((start, start + numel) for start, numel in spans)
    starts = [0, *(stop for _, stop in taken)]
    stops = [*(start for start, _ in taken), end]
    return [gap for gap in zip(starts, stops, strict=True) if gap[0] < gap[1]]


def _place(
    indices: Sequence[int], numels: Sequence[int], offsets: list[int], start: int, step: int
) -> int:
    """Write the offsets of ``indices`` laid end to end; return where the last one ends."""
    end = start
    for index, numel in zip(indices, numels, strict=True):
        offsets[index] = aligned(end, step)
        end = offsets[index] + numel
    return end
