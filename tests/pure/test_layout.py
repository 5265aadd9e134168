"""Shards tile their parameter; messages cover a bucket; a sum is divided exactly once."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_shard import _torch
from composable_shard.core.layout import (
    MESSAGE_ALIGNMENT_NBYTES,
    BucketLayout,
    ParamLayout,
    message_cost,
    plan_bucket,
)
from composable_shard.core.placement import matching_pieces, packing_alignment, plan_tensor
from composable_shard.core.reduction import Division, plan_division
from composable_shard.testing.strategies import big_shapes, shapes, shard_dims

NUM_SHARDS = st.integers(1, 6)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
BACKENDS = st.sampled_from(["gloo", "nccl", "another", None])


@st.composite
def param_layouts(draw: st.DrawFn, num_shards: int, itemsize: int = 4) -> ParamLayout:
    """Small and big ones, cut on any dim, with empty shards, or empty themselves."""
    small = shapes(num_shards, max_dims=4, min_extent=0)
    shape = draw(st.one_of(small, small, big_shapes(num_shards, itemsize)))
    return ParamLayout(shape, draw(shard_dims(shape)) % len(shape), num_shards)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[ParamLayout], BucketLayout, int, int, int]:
    num_shards, itemsize = draw(NUM_SHARDS), draw(ITEMSIZES)
    params = draw(st.lists(param_layouts(num_shards, itemsize), min_size=1, max_size=8))
    cost, step = message_cost(draw(BACKENDS), num_shards), draw(st.sampled_from([1, 2, 8, 16]))
    return params, plan_bucket(tuple(params), itemsize, cost, step), itemsize, cost, step


def do_not_overlap(spans: list[tuple[int, int]]) -> bool:
    filled = sorted((start, start + numel) for start, numel in spans if numel)
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
    ranks = range(layout.num_shards)
    shards = [
        full.narrow(layout.dim, layout.start(rank), layout.local_rows(rank)) for rank in ranks
    ]
    assert torch.equal(torch.cat(shards, layout.dim), full)
    for rank, shard in enumerate(shards):
        assert layout.local_shape(rank) == tuple(shard.shape)
        assert shard.numel() <= layout.shard_numel
    counts = [layout.local_rows(rank) for rank in ranks]
    assert layout.numel == prod(layout.shape) == layout.outer * layout.num_rows * layout.inner
    assert layout.num_full == sum(rows == layout.rows_per_shard > 0 for rows in counts)
    assert layout.num_nonempty == sum(rows > 0 for rows in counts)
    assert layout.is_even == (len(set(counts)) == 1)


@given(NUM_SHARDS.flatmap(param_layouts))
def test_pieces_convert_between_a_parameter_and_its_shards(layout: ParamLayout) -> None:
    full = torch.arange(1, layout.numel + 1)
    stack = torch.zeros(layout.num_shards, layout.shard_numel, dtype=full.dtype)
    for whole, shards in matching_pieces(layout, full, stack):
        shards.copy_(whole)
    for rank, row in enumerate(stack):
        start, count = layout.start(rank), layout.local_rows(rank)
        shard = full.view(layout.shape).narrow(layout.dim, start, count).reshape(-1)
        assert torch.equal(row[: len(shard)], shard) and not row[len(shard) :].any()
    back = torch.zeros_like(full)
    for whole, shards in matching_pieces(layout, back, stack):
        whole.copy_(shards)
    assert torch.equal(back, full)


@given(NUM_SHARDS.flatmap(lambda n: st.tuples(st.just(n), param_layouts(n))), st.data())
def test_a_tensor_of_any_strides_lies_in_flat_buffers_as_in_memory(
    drawn: tuple[int, ParamLayout], data: st.DataObject
) -> None:
    num_shards, cut = drawn
    order = data.draw(st.permutations(range(len(cut.shape))))
    tensor = torch.arange(cut.numel).view(cut.shape).permute(order)
    dim = order.index(cut.dim)
    layout = plan_tensor(tensor, dim, num_shards)
    flat = layout.in_memory_order(tensor).reshape(-1)
    assert torch.equal(layout.whole(flat), tensor)
    if tensor.numel() and min(tensor.shape) > 1:
        assert layout.whole(flat).stride() == tensor.stride()
    stack = layout.padded_shards(tensor)
    for rank in range(num_shards):
        assert torch.equal(layout.local(stack[rank], rank), layout.shard_of(tensor, rank))


@given(buckets())
def test_a_bucket(
    planned: tuple[list[ParamLayout], BucketLayout, int, int, int],
) -> None:
    params, bucket, itemsize, cost, step = planned
    assert [params[index] for index in bucket.order] == list(bucket.params)
    # Shards do not overlap in the sharded buffer, nor parameters in the unsharded one.
    shards = [
        (start, param.shard_numel)
        for start, param in zip(bucket.shard_offsets, bucket.params, strict=True)
    ]
    assert do_not_overlap(shards)
    assert all(0 <= start <= start + numel <= bucket.shard_numel for start, numel in shards)
    gathered = [
        (start, param.num_shards * param.shard_numel if index < bucket.num_direct else param.numel)
        for index, (start, param) in enumerate(
            zip(bucket.unsharded_offsets, bucket.params, strict=True)
        )
    ]
    assert do_not_overlap(gathered)
    assert all(start + numel <= bucket.unsharded_numel for start, numel in gathered)
    assert all(start * itemsize % MESSAGE_ALIGNMENT_NBYTES == 0 for start, _ in gathered)
    # Messages cover every shard once: one for each big parameter, one for all small ones.
    times_sent = torch.zeros(bucket.shard_numel, dtype=torch.int64)
    for offset, numel in bucket.message_spans:
        times_sent[offset : offset + numel] += 1
    for start, numel in shards:
        assert (times_sent[start : start + numel] == 1).all()
    assert len(bucket.message_spans) == bucket.num_direct + (bucket.packed_numel > 0)
    for index, param in enumerate(bucket.params):
        peers = param.num_shards - 1
        is_small = param.numel == 0 or param.numel * itemsize <= cost
        is_packed = peers > 0 and (is_small or not param.gathers_in_place)
        assert is_packed == (index >= bucket.num_direct)
    # Packed shards are aligned.
    starts = [*bucket.shard_offsets[bucket.num_direct :], bucket.packed_offset]
    assert all((start - bucket.packed_offset) % step == 0 for start in starts)
    assert bucket.packed_numel % step == 0


def test_messages_cost_by_the_peer_with_gloo_and_at_once_with_nccl() -> None:
    assert [message_cost("gloo", n) for n in (1, 2, 4)] == [0, 65536, 3 * 65536]
    assert [message_cost("nccl", n) for n in (1, 2, 4)] == [1024 * 1024] * 3


def test_packed_shards_begin_where_accelerators_load_the_narrowest_dtype() -> None:
    cpu, dtypes = torch.device("cpu"), (torch.float32, torch.bfloat16)
    assert packing_alignment(dtypes, cpu) == 1
    with _torch.pretended_backend("nccl"):
        assert packing_alignment(dtypes, cpu) == 8


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

ranks = st.integers(1, 4096)
divisors = st.none() | st.floats(0.125, 4096.0, allow_nan=False) | st.integers(1, 4096)


@given(ranks, st.sampled_from(DTYPES), divisors, st.booleans())
def test_the_three_factors_are_the_divisor(
    num_ranks: int, dtype: torch.dtype, divisor: float | None, averages: bool
) -> None:
    total = float(num_ranks if divisor is None else divisor)
    is_mean = divisor is None
    scale = plan_division(total, dtype, is_mean=is_mean, averages=averages, divides=False)
    assert scale.before * (scale.divisor or 1) * scale.after == total
    # Only half precision divides before, by a power of two; then the backend does not average,
    # nor if it cannot, nor under another divisor.
    assert scale.before == 2.0 ** int(scale.before.hex().partition("p")[2]) >= 1
    assert scale.before == 1 or dtype == torch.float16
    assert scale.divisor is None or (averages and is_mean and dtype != torch.float16)
    # A reduction that divides does all of it.
    scale = plan_division(total, dtype, is_mean=is_mean, averages=averages, divides=True)
    assert scale == Division(1.0, total, 1.0)


def test_half_precision_is_divided_before_by_about_the_root() -> None:
    before = [
        plan_division(total, torch.float16, is_mean=True, averages=True, divides=False).before
        for total in (1, 2, 7, 12, 64, 128)
    ]
    assert before == [1, 2, 1, 4, 8, 16]
