"""Shards tile their parameter; parameters do not overlap in a bucket; messages cover it."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.core.layout import (
    ALIGNMENT_NBYTES,
    BucketLayout,
    Packing,
    ParamLayout,
    end_to_end,
    gaps,
    packing_of,
    plan_bucket,
    travels_packed,
)
from composable_shard.testing.strategies import param_layouts

NUM_SHARDS = st.integers(1, 6)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
PACKINGS = [
    packing_of(backend, is_aligned=is_aligned)
    for backend in ("gloo", "nccl", "another", None)
    for is_aligned in (False, True)
]
GLOO, NCCL = PACKINGS[0], PACKINGS[3]


@st.composite
def buckets(draw: st.DrawFn) -> tuple[BucketLayout, int]:
    num_shards, itemsize = draw(NUM_SHARDS), draw(ITEMSIZES)
    params = draw(st.lists(param_layouts(num_shards, itemsize), max_size=8))
    packing, narrowest = draw(st.sampled_from(PACKINGS)), draw(ITEMSIZES)
    return (
        plan_bucket(tuple(params), num_shards, itemsize, packing, min(narrowest, itemsize)),
        itemsize,
    )


def ranges_do_not_overlap(ranges: list[tuple[int, int]]) -> bool:
    filled = sorted(r for r in ranges if r[0] < r[1])
    return all(end <= start for (_, end), (start, _) in pairwise(filled))


@given(st.integers(0, 200), st.integers(1, 40))
def test_shards_have_the_rows_of_torch_chunk_and_then_none(rows: int, num_shards: int) -> None:
    layout = ParamLayout((rows, 3), 0, num_shards)
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(num_shards)]
    expected = chunks + [0] * (num_shards - len(chunks))
    assert [layout.local_rows(rank) for rank in range(num_shards)] == expected


@given(NUM_SHARDS.flatmap(param_layouts))
def test_shards_tile_the_parameter(layout: ParamLayout) -> None:
    full = torch.arange(layout.numel).view(layout.shape)
    shards = [
        full.narrow(layout.dim, layout.start(rank), layout.local_rows(rank))
        for rank in range(layout.num_shards)
    ]
    assert torch.equal(torch.cat(shards, layout.dim), full)
    for rank, shard in enumerate(shards):
        assert layout.local_shape(rank) == tuple(shard.shape)
        assert layout.local_numel(rank) == shard.numel()
        assert shard.numel() <= layout.shard_numel


@given(NUM_SHARDS.flatmap(param_layouts))
def test_counts_agree_with_the_shape(layout: ParamLayout) -> None:
    assert layout.numel == prod(layout.shape)
    assert layout.outer * layout.rows * layout.inner == layout.numel
    assert layout.gathered_numel == layout.num_shards * layout.shard_numel
    assert layout.gathered_numel >= layout.numel
    counts = [layout.local_rows(rank) for rank in range(layout.num_shards)]
    full = [rows for rows in counts if rows == layout.rows_per_shard and rows]
    rest = [rows for rows in counts if 0 < rows < layout.rows_per_shard]
    assert layout.num_full_shards == len(full)
    assert [layout.num_remaining_rows] == (rest or [0])
    assert layout.is_even == (len(set(counts)) == 1)


@pytest.mark.parametrize(
    ("shape", "dim", "num_shards", "message"),
    [
        ((2, 3), 2, 2, "Expected a dim within 2 dims, got 2"),
        ((2, 3), -1, 2, "Expected a dim within 2 dims, got -1"),
        ((), 0, 2, "Expected a dim within 0 dims, got 0"),
        ((2, 3), 0, 0, "Expected at least 1 shard, got 0"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    shape: tuple[int, ...], dim: int, num_shards: int, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        ParamLayout(shape, dim, num_shards)
    assert str(caught.value) == message


@given(st.integers(2, 64), ITEMSIZES, st.sampled_from(PACKINGS))
def test_a_parameter_travels_packed_up_to_the_bytes_that_messages_are_worth(
    num_shards: int, itemsize: int, packing: Packing
) -> None:
    most = packing.cost_nbytes(num_shards - 1) // itemsize
    assert travels_packed(ParamLayout((most,), 0, num_shards), itemsize, packing)
    assert not travels_packed(ParamLayout((most + 1,), 0, num_shards), itemsize, packing)


def test_messages_cost_by_the_peer_with_gloo_and_at_once_with_nccl() -> None:
    assert [GLOO.cost_nbytes(num_peers) for num_peers in (1, 7)] == [64 * 1024, 7 * 64 * 1024]
    assert [NCCL.cost_nbytes(num_peers) for num_peers in (1, 7)] == [1024 * 1024] * 2
    assert (GLOO.alignment_nbytes, NCCL.alignment_nbytes) == (1, 16)


@given(buckets())
def test_a_bucket(planned: tuple[BucketLayout, int]) -> None:
    bucket, itemsize = planned
    # Shards do not overlap in the sharded bucket.
    ranges = [
        (start, start + param.shard_numel)
        for start, param in zip(bucket.shard_offsets, bucket.params, strict=True)
    ]
    assert ranges_do_not_overlap(ranges)
    assert all(start >= 0 and end <= bucket.shard_numel for start, end in ranges)
    # Nor do parameters in the unsharded one.
    ranges = [
        (start, start + (param.numel if index in bucket.permuted else param.gathered_numel))
        for index, (start, param) in enumerate(
            zip(bucket.unsharded_offsets, bucket.params, strict=True)
        )
    ]
    assert ranges_do_not_overlap(ranges)
    assert all(start >= 0 and end <= bucket.unsharded_numel for start, end in ranges)
    assert all(start * itemsize % ALIGNMENT_NBYTES == 0 for start, _ in ranges)
    # Messages cover the sharded bucket once.
    times_sent = torch.zeros(bucket.shard_numel, dtype=torch.int64)
    for offset, numel in bucket.messages:
        assert offset >= 0 and offset + numel <= bucket.shard_numel
        times_sent[offset : offset + numel] += 1
    for start, param in zip(bucket.shard_offsets, bucket.params, strict=True):
        assert (times_sent[start : start + param.shard_numel] == 1).all()
    num_idle = int((times_sent == 0).sum())
    assert int(times_sent.sum()) + num_idle == bucket.shard_numel
    assert num_idle * itemsize < ALIGNMENT_NBYTES * max(1, len(bucket.messages))
    # There is one message for each big parameter, and one for all small ones.
    small = [travels_packed(param, itemsize, bucket.packing) for param in bucket.params]
    assert len(bucket.messages) == small.count(False) + (bucket.packed_numel > 0)
    assert set(bucket.packed) == {index for index, is_small in enumerate(small) if is_small}
    padding = bucket.packed_numel - sum(bucket.params[i].shard_numel for i in bucket.packed)
    assert 0 <= padding <= len(bucket.packed) * (bucket.alignment - 1)
    if bucket.packed_numel:
        assert bucket.messages[-1] == (bucket.packed_offset, bucket.packed_numel)
        assert bucket.packed_offset + bucket.packed_numel == bucket.shard_numel
    # Only what lies in order gathers into place.
    indices = sorted(bucket.direct + bucket.permuted + bucket.packed)
    assert indices == list(range(len(bucket.params)))
    for index in bucket.direct + bucket.packed:
        param = bucket.params[index]
        assert bucket.num_shards == 1 or param.outer == 1 or param.numel == 0
    for index in bucket.permuted:
        assert bucket.num_shards > 1 and bucket.params[index].outer != 1
    staged = sum(bucket.params[i].gathered_numel for i in bucket.permuted)
    staged += bucket.num_shards * bucket.packed_numel
    assert [numel for _, numel in bucket.staged] == [
        bucket.num_shards * numel for _, numel in bucket.messages[len(bucket.direct) :]
    ]
    if bucket.alignment == 1:
        assert bucket.staging_numel == staged
    # Gathers write all but what is called unwritten.
    written = torch.zeros(bucket.unsharded_numel, dtype=torch.bool)
    for index, (start, param) in enumerate(
        zip(bucket.unsharded_offsets, bucket.params, strict=True)
    ):
        numel = param.gathered_numel
        if index in bucket.permuted:
            numel = param.numel
        elif index in bucket.packed:
            numel = param.num_nonempty_shards * param.shard_numel
        written[start : start + numel] = True
        assert numel >= param.numel
    for start, end in bucket.unwritten:
        assert not written[start:end].any()
        written[start:end] = True
    assert written.all()


@given(buckets(), ITEMSIZES)
def test_what_is_packed_is_aligned_in_the_wire_dtype_and_in_a_narrower_one(
    planned: tuple[BucketLayout, int], num_flags: int
) -> None:
    bucket, itemsize = planned
    nbytes = bucket.packing.alignment_nbytes
    for size in (itemsize, max(1, nbytes // bucket.alignment)):  # the second is the narrowest
        starts = [bucket.shard_offsets[index] for index in bucket.packed]
        starts += [start for start, _ in bucket.staged]
        starts += [bucket.packed_offset, bucket.packed_numel, bucket.aligned(num_flags)]
        assert all(start * size % nbytes == 0 for start in starts)


@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from([1, 4, 16]))
def test_ranges_end_to_end_and_the_gaps_between_them(numels: list[int], step: int) -> None:
    starts, end = end_to_end(numels, step)
    assert all(start % step == 0 for start in starts)
    spans = list(zip(starts, numels, strict=True))
    between = gaps(spans, end)
    assert sum(numels) + sum(stop - start for start, stop in between) == end
    assert all(stop - start < step for start, stop in between)
