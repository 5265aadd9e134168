"""Small gradients side by side: one by one, or by a fused kernel, and their flags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.core.gradient_bucket import PackedGrads, flags_travel_alone
from composable_shard.core.layout import BucketLayout, Packing, ParamLayout, packing_of, plan_bucket
from composable_shard.testing.strategies import param_layouts

NUM_SHARDS = st.integers(1, 5)
CPU = torch.device("cpu")
PLAIN, ALIGNED = (packing_of("gloo", is_aligned=is_aligned) for is_aligned in (False, True))


def packed(
    bucket: BucketLayout, grads: list[torch.Tensor | None], *, fuses: bool
) -> torch.Tensor:  # [num_shards, columns]
    present = [grad is not None for grad in grads]
    packing = PackedGrads(bucket, len(grads), torch.float32, CPU, fuses=fuses)
    (message,) = packing.pack(grads, present, clears=True)
    return message.view(bucket.num_shards, -1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BucketLayout, list[torch.Tensor | None]]:
    num_shards = draw(NUM_SHARDS)
    params = draw(st.lists(param_layouts(num_shards), min_size=1, max_size=4))
    grads: list[torch.Tensor | None] = []
    for param in params:
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        grad = torch.arange(1, param.numel + 1, dtype=dtype).view(param.shape)
        grads.append(draw(st.sampled_from([grad, None])))
    packing = draw(st.sampled_from([PLAIN, ALIGNED]))
    return plan_bucket(tuple(params), num_shards, 4, packing), grads


@given(cases())
def test_what_is_copied_one_by_one_is_what_the_fused_kernel_packs(
    case: tuple[BucketLayout, list[torch.Tensor | None]],
) -> None:
    bucket, grads = case
    copied, fused = (packed(bucket, grads, fuses=fuses) for fuses in (False, True))
    assert torch.equal(copied, fused)
    expected = torch.zeros(bucket.num_shards, bucket.packed_numel + bucket.aligned(len(grads)))
    for index in bucket.packed:
        param, grad = bucket.params[index], grads[index]
        start = bucket.shard_offsets[index] - bucket.packed_offset
        for rank in range(bucket.num_shards if grad is not None else 0):
            shard = grad.narrow(param.dim, param.start(rank), param.local_rows(rank))
            expected[rank, start : start + shard.numel()] = shard.reshape(-1)
    for index, grad in enumerate(grads):
        expected[:, bucket.packed_numel + index] = float(grad is not None)
    assert torch.equal(fused, expected)


@pytest.mark.parametrize("fuses", [False, True])
@given(st.lists(st.booleans(), min_size=1, max_size=9), NUM_SHARDS)
def test_the_flags_of_every_shard_say_which_gradients_there_are(
    fuses: bool, present: list[bool], num_shards: int
) -> None:
    params = tuple(ParamLayout((3,), 0, num_shards) for _ in present)
    bucket = plan_bucket(params, num_shards, 4, PLAIN)
    grads = [torch.ones(3) if is_present else None for is_present in present]
    packing = PackedGrads(bucket, len(present), torch.float32, CPU, fuses=fuses)
    for _ in range(2):
        flags = packing.pack(grads, present)[0].view(num_shards, -1)[:, -len(present) :]
        assert flags.tolist() == [[float(one) for one in present]] * num_shards


def packing_one(numel: int) -> PackedGrads:
    bucket = plan_bucket((ParamLayout((numel,), 0, 2),), 2, 4, PLAIN)
    return PackedGrads(bucket, 1, torch.float32, CPU, fuses=False)


def test_memory_that_somebody_still_reads_is_neither_freed_nor_written() -> None:
    packing = packing_one(6)
    (first,) = packing.pack([torch.ones(6)], [True])
    offered = first.view(2, -1)[1]
    del first
    packing.release()
    assert offered.tolist() == [1.0] * 4
    (second,) = packing.pack([torch.zeros(6)], [True])
    assert offered.tolist() == [1.0] * 4
    assert second.tolist() == [0.0, 0.0, 0.0, 1.0] * 2


def test_memory_is_freed_when_it_was_read_and_used_again() -> None:
    packing = packing_one(6)
    (first,) = packing.pack([torch.ones(6)], [True])
    storage = first.untyped_storage()
    del first
    packing.release()
    assert storage.nbytes() == 0
    (second,) = packing.pack([torch.full((6,), 2.0)], [True])
    assert storage.data_ptr() == second.data_ptr()
    assert second.tolist() == [2.0, 2.0, 2.0, 1.0] * 2


NCCL = packing_of("nccl", is_aligned=True)


@pytest.mark.parametrize("packing", [PLAIN, NCCL])
def test_flags_travel_alone_where_they_are_more_than_a_message_to_one_peer_costs(
    packing: Packing,
) -> None:
    most = packing.cost_nbytes(1) // 4 // 2
    for num_shards, alone in ((most, False), (most + 1, True)):
        assert flags_travel_alone(plan_bucket((), num_shards, 4, packing), 2, 4) == alone
