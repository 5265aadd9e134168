"""Shards gathered by a layout are the parameters again, and gradients reduce to their shards.

The collectives are simulated on plain tensors, all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from composable_shard.core.bucket import Staging, matching_pieces
from composable_shard.core.gradient_bucket import GradBucket, GradTransfer
from composable_shard.core.layout import BucketLayout, ParamLayout, packing_of, plan_bucket
from composable_shard.testing.strategies import param_layouts

NUM_SHARDS = st.integers(1, 5)
PADDING = -1
PLAIN, ALIGNED = (packing_of("gloo", is_aligned=is_aligned) for is_aligned in (False, True))
CPU = torch.device("cpu")


def numbered(params: Sequence[ParamLayout]) -> list[torch.Tensor]:
    """Parameters whose elements are all different."""
    tensors, start = [], 0
    for param in params:
        tensors.append(torch.arange(start, start + param.numel).view(param.shape))
        start += param.numel
    return tensors


def shard_of(param: ParamLayout, full: torch.Tensor, rank: int) -> torch.Tensor:
    return full.narrow(param.dim, param.start(rank), param.local_rows(rank))


def sharded_bucket(bucket: BucketLayout, full: list[torch.Tensor], rank: int) -> torch.Tensor:
    flat = torch.full((bucket.shard_numel,), PADDING)
    for param, start, tensor in zip(bucket.params, bucket.shard_offsets, full, strict=True):
        shard = shard_of(param, tensor, rank)
        flat[start : start + shard.numel()] = shard.reshape(-1)
    return flat


def gathered_bucket(
    bucket: BucketLayout, shards: list[torch.Tensor], *, fuses: bool
) -> torch.Tensor:
    """What the messages of all ranks become in the unsharded buffer."""
    flat = torch.full((bucket.unsharded_numel,), PADDING)
    arrived = [
        torch.cat([shard[offset : offset + numel] for shard in shards])
        for offset, numel in bucket.messages
    ]
    for index in bucket.direct:
        start = bucket.unsharded_offsets[index]
        flat[start : start + bucket.params[index].gathered_numel] = arrived.pop(0)
    regions = {}
    for index in bucket.permuted + bucket.packed:
        param, start = bucket.params[index], bucket.unsharded_offsets[index]
        numel = param.numel if index in bucket.permuted else param.gathered_numel
        regions[index] = flat[start : start + numel]
    if arrived:
        staging = Staging(bucket, regions, fuses=fuses)
        staging.free()
        staging.allocate()
        for message, got in zip(staging.messages, arrived, strict=True):
            message.copy_(got)
        staging.copy_out()
    return flat


def views(bucket: BucketLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    return [
        flat[start : start + param.numel].view(param.shape)
        for param, start in zip(bucket.params, bucket.unsharded_offsets, strict=True)
    ]


@st.composite
def buckets(draw: st.DrawFn) -> BucketLayout:
    num_shards = draw(NUM_SHARDS)
    params = draw(st.lists(param_layouts(num_shards), min_size=1, max_size=5))
    packing = draw(st.sampled_from([PLAIN, ALIGNED]))
    return plan_bucket(tuple(params), num_shards, 4, packing, draw(st.sampled_from([1, 4])))


@given(buckets(), st.booleans())
def test_gather_then_view_is_the_identity(bucket: BucketLayout, fuses: bool) -> None:
    full = numbered(bucket.params)
    shards = [sharded_bucket(bucket, full, rank) for rank in range(bucket.num_shards)]
    gathered = gathered_bucket(bucket, shards, fuses=fuses)
    for got, wanted in zip(views(bucket, gathered), full, strict=True):
        assert torch.equal(got, wanted)


@given(NUM_SHARDS.flatmap(param_layouts))
def test_matching_pieces_pair_every_element_once_and_no_padding(layout: ParamLayout) -> None:
    full = torch.arange(layout.numel)
    shards = torch.full((layout.gathered_numel,), PADDING)
    for whole, piece in matching_pieces(layout, full, shards):
        assert whole.shape == piece.shape
        piece.copy_(whole)
    expected = torch.full((layout.num_shards, layout.shard_numel), PADDING)
    for rank in range(layout.num_shards):
        shard = shard_of(layout, full.view(layout.shape), rank).reshape(-1)
        expected[rank, : shard.numel()] = shard
    assert torch.equal(shards.view(expected.shape), expected)
    back = torch.full_like(full, PADDING)
    for whole, piece in matching_pieces(layout, back, shards):
        whole.copy_(piece)
    assert torch.equal(back, full)


def reduced(transfers: list[GradTransfer], rank: int) -> GradTransfer:
    """What the reduce-scatter of all ranks' inputs leaves on ``rank``."""
    mine = transfers[rank]
    for place, output in enumerate(mine.outputs):
        parts = [t.inputs[place].view(len(transfers), -1)[rank] for t in transfers]
        output.copy_(torch.stack(parts).sum(0))
    return mine


@st.composite
def ranks_grads(draw: st.DrawFn) -> tuple[list[ParamLayout], list[list[torch.Tensor | None]]]:
    """Integer-valued gradients, so that every order of summation gives the same floats."""
    num_shards = draw(NUM_SHARDS)
    params = draw(st.lists(param_layouts(num_shards), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    grads: list[list[torch.Tensor | None]] = []
    for rank in range(num_shards):
        grads.append([])
        for param in params:
            grad = (torch.arange(param.numel, dtype=dtype) * (rank + 1)).view(param.shape)
            how = draw(st.sampled_from(["dense", "dense", "transposed", "missing"]))
            if how == "transposed":
                grad = grad.t().contiguous().t() if grad.ndim == 2 else grad
            grads[-1].append(None if how == "missing" else grad)
    return params, grads


IN_ORDER = [ParamLayout((1,), 0, 2), ParamLayout((1, 2), 1, 2), ParamLayout((1, 1, 3), 2, 2)]


@example(
    (IN_ORDER, [[torch.full(param.shape, 1.0 + rank) for param in IN_ORDER] for rank in range(2)])
)
@given(ranks_grads())
def test_every_rank_is_left_with_its_shard_of_the_sum(
    case: tuple[list[ParamLayout], list[list[torch.Tensor | None]]],
) -> None:
    params, grads = case
    wanted: list[torch.Tensor | None] = []
    for of_one_param in zip(*grads, strict=True):
        present = [grad for grad in of_one_param if grad is not None]
        wanted.append(torch.stack(present).sum(0).float() if present else None)
    packing = ALIGNED if sum(param.numel for param in params) % 2 else PLAIN
    bucket = GradBucket(params, len(grads), torch.float32, CPU, packing, 2)
    transfers = [
        bucket.start_reduce([g if g is None else g.clone() for g in of_rank]) for of_rank in grads
    ]
    for rank in range(len(grads)):
        transfer = reduced(transfers, rank)
        anybody_has = bucket.anybody_has(transfer)
        has = [True] * len(wanted) if anybody_has is None else anybody_has.bool().tolist()
        assert has == [total is not None for total in wanted]
        shards = [
            transfer.result[start : start + param.local_numel(rank)].view(param.local_shape(rank))
            for start, param in zip(bucket.layout.shard_offsets, bucket.layout.params, strict=True)
        ]
        for param, shard, total in zip(params, shards, wanted, strict=True):
            if total is not None:
                assert torch.equal(shard, shard_of(param, total, rank))
            else:
                assert not shard.any()
