"""Small gradients side by side: one by one, or by a fused kernel, and their flags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard import _torch
from composable_shard.core.grads.packing import PackedGrads
from composable_shard.core.params.layout import BucketLayout, ParamLayout, plan_bucket
from composable_shard.testing.strategies import param_layouts

NUM_SHARDS = st.integers(1, 5)
CPU = torch.device("cpu")


def packed(
    bucket: BucketLayout, grads: list[torch.Tensor | None], *, fuses: bool
) -> torch.Tensor:  # [num_shards, columns]
    present = [grad is not None for grad in grads]
    packing = PackedGrads(bucket, len(grads), torch.float32, CPU, fuses=fuses)
    return packing.pack(grads, present).view(bucket.num_shards, -1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BucketLayout, list[torch.Tensor | None]]:
    num_shards = draw(NUM_SHARDS)
    params = draw(st.lists(param_layouts(num_shards), min_size=1, max_size=4))
    grads: list[torch.Tensor | None] = []
    for param in params:
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        grad = torch.arange(1, param.numel + 1, dtype=dtype).view(param.shape)
        grads.append(draw(st.sampled_from([grad, None])))
    return plan_bucket(tuple(params), num_shards, 4), grads


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_is_copied_one_by_one_is_what_the_fused_kernel_packs(
    case: tuple[BucketLayout, list[torch.Tensor | None]],
) -> None:
    bucket, grads = case
    copied, fused = (packed(bucket, grads, fuses=fuses) for fuses in (False, True))
    start = 0
    for index in bucket.packed:
        param = bucket.params[index]
        for rank in range(bucket.num_shards):
            end = start + param.local_numel(rank)
            assert torch.equal(copied[rank, start:end], fused[rank, start:end])
        start += param.shard_numel
    assert torch.equal(copied[:, start:], fused[:, start:])


@pytest.mark.parametrize("fuses", [False, True])
@given(st.lists(st.booleans(), min_size=1, max_size=9), NUM_SHARDS)
def test_the_flags_of_every_shard_say_which_gradients_there_are(
    fuses: bool, present: list[bool], num_shards: int
) -> None:
    bucket = plan_bucket(tuple(ParamLayout((3,), 0, num_shards) for _ in present), num_shards, 4)
    grads = [torch.ones(3) if is_present else None for is_present in present]
    packing = PackedGrads(bucket, len(present), torch.float32, CPU, fuses=fuses)
    for _ in range(2):
        flags = packing.pack(grads, present).view(num_shards, -1)[:, -len(present) :]
        assert flags.tolist() == [[float(one) for one in present]] * num_shards


def test_the_fused_kernel_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that do not overlap with themselves, of one dtype."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(_torch, "chunk_cat_into", lambda out, tensors: seen.extend(tensors))
    bucket = plan_bucket((ParamLayout((5, 3), 0, 4),) * 2, 4, 4)
    grads: list[torch.Tensor | None]
    for grads in ([torch.ones(5, 3)] * 2, [torch.ones(5, 3).bfloat16(), None]):
        seen.clear()
        packed(bucket, grads, fuses=True)
        assert grads[0] is not None
        assert [(one.is_contiguous(), one.dtype) for one in seen] == [(True, grads[0].dtype)] * 3
