"""Memory that runs out in the middle of a gather: nothing of it is kept, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.core.params.bucket import ParamBucket
from composable_shard.testing import run_ranks


class TwoKinds(nn.Module):
    """Weights of two dtypes, so two buffers to allocate for one gather."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(4, 4)
        self.fine = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fine(self.coarse(x).double())


def nbytes_of(block: Any) -> list[int]:
    buckets = block._group().units._units
    return [bucket.unsharded.untyped_storage().nbytes() for bucket in buckets]


def run_out(in_backward: bool, num_ranks_kept: int | bool) -> list[object]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(TwoKinds(), nn.Linear(4, 1, dtype=torch.float64))
    for layer in model:
        fully_shard(layer, reshard_after_forward=num_ranks_kept)
    fully_shard(model)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    allocate, is_full = ParamBucket._allocate, [False]

    def fail_for_the_second(bucket: ParamBucket) -> None:
        if is_full[0] and bucket.sharded.dtype == torch.float64:
            raise torch.OutOfMemoryError("no memory is left")
        allocate(bucket)

    ParamBucket._allocate = fail_for_the_second  # type: ignore[method-assign]
    try:
        is_full[0] = not in_backward
        with pytest.raises(torch.OutOfMemoryError):
            loss = model(x).sum()
            is_full[0] = True
            loss.backward()
        left = nbytes_of(model[0])
    finally:
        ParamBucket._allocate = allocate  # type: ignore[method-assign]
    model(x).sum().backward()
    gradients = [param.grad.to_local() for param in model.parameters()]
    return [left, all(map(torch.equal, gradients, expected))]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("ranks", "kept"), [(2, True), (4, 2)])
def test_a_gather_gets_all_its_memory_or_none(
    ranks: int, kept: int | bool, in_backward: bool
) -> None:
    assert run_ranks(run_out, ranks, in_backward, kept) == [[[0, 0], True]] * ranks
