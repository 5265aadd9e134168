"""PURE (without torch): the layout of one parameter in shards, and of a bucket in flat buffers.

One parameter of 5 rows over 2 shards of 3 rows (ceil division), with one row of padding::

    rank 0   | r0 r1 r2 |            gathered   | r0 r1 r2 | r3 r4 -- |
    rank 1   | r3 r4 -- |                         the first 5 rows are the parameter

One bucket with large parameters A, B and small ones c, d, over 2 shards::

    sharded (on rank r)   | A_r     | B_r     | c_r d_r |
    messages                first     second    third, packed
    unsharded             | A_0 A_1 | B_0 B_1 | c_0 c_1 | d_0 d_1 |

The padding of a parameter comes after its rows, so a parameter with its own message is gathered
straight into place. Packed parameters arrive in a staging buffer and are copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

MESSAGE_ALIGNMENT_NBYTES = 64
"""A parameter with its own message starts at a multiple of this many bytes."""

PACKED_ALIGNMENT_NBYTES = 16
"""On accelerators, packed shards start at multiples of this many bytes: the width of loads by NCCL
and by fused optimizers."""


# One parameter ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamLayout:
    """The sharding of a parameter of ``shape`` along ``dim`` into ``num_shards`` shards.

    Every shard has ``rows_per_shard`` rows, but the last shards may have fewer rows or none. In
    messages, each shard is padded at its end to ``shard_numel`` elements.

    Args:
        shape: The shape, with dims in memory order (by descending stride).
        dim: The sharded dim, as an index into ``shape``.
        num_shards: The number of ranks that share the parameter.
    """

    shape: tuple[int, ...]
    dim: int
    num_shards: int

    @cached_property
    def num_rows(self) -> int:
        return self.shape[self.dim]

    @cached_property
    def rows_per_shard(self) -> int:
        return -(-self.num_rows // self.num_shards)

    @cached_property
    def outer(self) -> int:
        """The product of the sizes of the dims before the sharded dim."""
        return prod(self.shape[: self.dim])

    @cached_property
    def inner(self) -> int:
        """The product of the sizes of the dims after the sharded dim."""
        return prod(self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements of a padded shard."""
        return self.outer * self.rows_per_shard * self.inner

    @cached_property
    def is_even(self) -> bool:
        """Whether no shard is padded."""
        return self.num_rows == self.rows_per_shard * self.num_shards

    @cached_property
    def gathers_in_place(self) -> bool:
        """Whether the shards, laid end to end, form the parameter."""
        return self.outer == 1 or self.num_shards == 1

    @cached_property
    def num_full(self) -> int:
        """Number of shards without padding; they come first."""
        return self.num_rows // self.rows_per_shard if self.num_rows else 0

    @cached_property
    def num_nonempty(self) -> int:
        """Number of shards with rows; they come first."""
        return -(-self.num_rows // self.rows_per_shard) if self.num_rows else 0

    def start(self, rank: int) -> int:
        """Return the first row of a rank."""
        return min(rank * self.rows_per_shard, self.num_rows)

    def local_rows(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return self.start(rank + 1) - self.start(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of a rank, without padding."""
        return (*self.shape[: self.dim], self.local_rows(rank), *self.shape[self.dim + 1 :])


# The parameters of one bucket ---------------------------------------------------------------------


MESSAGE_COSTS = {"gloo": (0, 64 * 1024), "nccl": (1024 * 1024, 0)}
"""By backend: the fixed cost of a message and its cost per peer, both as the bytes that could
be copied in the same time. `benchmarks/packing.py` measured gloo's; nccl's is an estimate."""


def message_cost(backend: str | None, num_shards: int) -> int:
    """Return the cost of a message, as the number of bytes that could be copied in the same time.

    Args:
        backend: The name of the backend; ``None`` if there is only one rank. Backends that are not
            in `MESSAGE_COSTS` count as gloo.
        num_shards: The number of ranks that share the parameters.
    """
    cost, per_peer = MESSAGE_COSTS.get(backend or "", MESSAGE_COSTS["gloo"])
    return cost + (num_shards - 1) * per_peer


@dataclass(frozen=True)
class BucketLayout:
    """Offsets, in elements, of the parameters in the flat buffers of a bucket.

    Attributes:
        order: For each place in the bucket, the index of the parameter in the argument ``params``
            of :func:`plan_bucket`. The parameters with their own message come first.
        params: The parameters in that order.
        num_direct: The number of direct parameters: those with their own message.
        shard_offsets: The offset of each parameter in the sharded buffer.
        packed_offset: The offset of the packed message in the sharded buffer.
        packed_numel: Number of elements of the packed message of one rank.
        shard_numel: Number of elements of the sharded buffer.
        unsharded_offsets: The offset of each parameter in the unsharded buffer.
        unsharded_numel: Number of elements of the unsharded buffer.
    """

    order: tuple[int, ...]
    params: tuple[ParamLayout, ...]
    num_direct: int
    shard_offsets: tuple[int, ...]
    packed_offset: int
    packed_numel: int
    shard_numel: int
    unsharded_offsets: tuple[int, ...]
    unsharded_numel: int

    @cached_property
    def message_spans(self) -> list[tuple[int, int]]:
        """Offset and number of elements of each message in the sharded buffer."""
        numels = (param.shard_numel for param in self.params)
        spans = list(zip(self.shard_offsets[: self.num_direct], numels, strict=False))
        return [*spans, (self.packed_offset, self.packed_numel)] if self.packed_numel else spans


@lru_cache(maxsize=4096)
def plan_bucket(
    params: tuple[ParamLayout, ...], itemsize: int, cost: int, packed_alignment: int
) -> BucketLayout:
    """Lay out parameters in the flat buffers of one bucket.

    Args:
        params: One or more parameters; all have the same number of shards.
        itemsize: Bytes of an element in the all-gather.
        cost: The cost of a message; see :func:`message_cost`.
        packed_alignment: Packed shards start at multiples of this many elements.
    """
    is_direct = [not is_packed(param, itemsize, cost) for param in params]
    order = sorted(range(len(params)), key=lambda index: not is_direct[index])
    ordered, num_direct = tuple(params[index] for index in order), sum(is_direct)
    step = max(1, MESSAGE_ALIGNMENT_NBYTES // itemsize)
    numels = [param.shard_numel for param in ordered]
    direct_offsets, end = _end_to_end(numels[:num_direct], step)
    packed_offset = aligned(end, step) if num_direct < len(params) else end
    packed_offsets, packed_numel = _end_to_end(numels[num_direct:], packed_alignment)
    packed_numel = aligned(packed_numel, packed_alignment)
    gathered_numels = [
        param.num_shards * param.shard_numel if param.gathers_in_place else param.numel
        for param in ordered
    ]
    unsharded_offsets, unsharded_numel = _end_to_end(gathered_numels, step)
    return BucketLayout(
        order=tuple(order),
        params=ordered,
        num_direct=num_direct,
        shard_offsets=(*direct_offsets, *(packed_offset + start for start in packed_offsets)),
        packed_offset=packed_offset,
        packed_numel=packed_numel,
        shard_numel=packed_offset + packed_numel,
        unsharded_offsets=tuple(unsharded_offsets),
        # `Regather` cuts the buffer into k equal parts: k divides num_shards, so that is enough.
        unsharded_numel=aligned(unsharded_numel, params[0].num_shards),
    )


def plan_messages(
    params: Sequence[ParamLayout], num_direct: int, alignment: int
) -> tuple[list[int], list[int]]:
    """Lay out the messages of a reduce-scatter.

    The last message ends with one flag for each gradient: whether this rank has the gradient.

    Args:
        params: The layouts of the gradients, those with their own message first.
        num_direct: The number of gradients with their own message.
        alignment: Packed gradients are padded to a multiple of this many elements.

    Returns:
        For each message, the number of elements for one rank. For each gradient, the offset of its
        shard in the reduced buffer, which holds the messages for one rank end to end.
    """
    numels = [param.shard_numel for param in params]
    direct, end = _end_to_end(numels[:num_direct], 1)
    packed, packed_numel = _end_to_end(numels[num_direct:], alignment)
    last = aligned(packed_numel, alignment) + len(numels)
    return [*numels[:num_direct], last], [*direct, *(end + start for start in packed)]


def is_packed(param: ParamLayout, itemsize: int, cost: int | None) -> bool:
    """Return whether a parameter shares the packed message.

    A parameter is packed if it cannot be gathered in place, or is cheaper to copy than to send
    alone, as an empty one always is. There are two exceptions: if ``cost`` is ``None`` (a bucket
    with one message), all parameters are packed; otherwise, with one shard, none is.
    """
    if cost is None:
        return True
    if param.num_shards == 1:
        return False
    return not param.gathers_in_place or param.numel * itemsize <= cost


def aligned(offset: int, step: int) -> int:
    """Return the first multiple of ``step`` at or above ``offset``."""
    return -(-offset // step) * step


def _end_to_end(numels: Sequence[int], step: int) -> tuple[list[int], int]:
    """Return the offsets of spans laid end to end, at multiples of ``step``, and their end."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(aligned(end, step))
        end = offsets[-1] + numel
    return offsets, end
