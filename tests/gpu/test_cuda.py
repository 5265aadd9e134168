"""The same facts on a CUDA device: one NCCL rank against the unsharded model, streams in order.

What more ranks do differently is the collective itself, which the tests on CPU ranks cover; what a
device does differently is asynchrony, which these cover.
"""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard._torch import poisoned_memory
from composable_shard.testing import fake_ranks

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(width: int = 256, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth))).cuda()


def shard(model: nn.Sequential, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
    for block in model:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def test_one_rank_trains_bitwise_as_unsharded(nccl_rank: None) -> None:
    model = stack()
    reference = copy.deepcopy(model)
    shard(model)
    optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in (model, reference)]
    for step in range(5):
        torch.manual_seed(step)
        batch = torch.randn(64, 256, device="cuda")
        losses = [m(batch).square().mean() for m in (model, reference)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == losses[1].item()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs)


def test_one_rank_in_low_precision_computes_with_rounded_weights(nccl_rank: None) -> None:
    model = stack()
    reference = copy.deepcopy(model).bfloat16()
    shard(model, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    batch = torch.randn(64, 256, device="cuda")
    ours, theirs = model(batch), reference(batch.bfloat16())
    ours.float().sum().backward()
    theirs.float().sum().backward()
    assert torch.equal(ours, theirs)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad.to_local(), other.grad.float())


def test_buffers_are_moved_in_place_so_that_modules_go_on_sharing_them(nccl_rank: None) -> None:
    blocks, shared = [nn.Linear(4, 4).cuda() for _ in range(2)], torch.arange(3.0)
    pair = TwoTensor(torch.ones(2), torch.zeros(2))
    for block in blocks:
        block.register_buffer("shared", shared)
        block.register_buffer("pair", pair)
        fully_shard(block)
    assert blocks[0].shared is blocks[1].shared is shared and blocks[0].pair is blocks[1].pair
    assert {shared.device, pair.device, pair.a.device} == {torch.device("cuda", 0)}
    assert shared.tolist() == [0, 1, 2] and pair.a.tolist() == [1, 1]


def test_a_step_does_not_wait_for_the_device() -> None:
    with fake_ranks(4):
        model = shard(stack(depth=2))
        batch = torch.randn(8, 256, device="cuda")
        model(batch).sum().backward()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                model(batch).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [str(wait.message) for wait in waits] == []


@poisoned_memory(False)  # which keeps memory for a while
def test_memory_returns_to_the_shards_and_gradients() -> None:
    with fake_ranks(8):
        stack(width=512, depth=8)(torch.randn(8, 512, device="cuda")).sum().backward()
        gc.collect()  # now there are cuBLAS's workspaces, and no cycles that earlier tests left
        torch.cuda.empty_cache()  # a cached block that is reused may be 1 MiB larger than needed
        before = torch.cuda.memory_allocated()
        model = shard(stack(width=512, depth=8))
        shards = torch.cuda.memory_allocated() - before
        batch = torch.randn(8, 512, device="cuda")
        model(batch).sum().backward()
        model.zero_grad()
        model.reshard()
        del batch
        left = torch.cuda.memory_allocated() - before
        full = sum(param.numel() * param.itemsize for param in model.parameters())
    assert shards < full / 8 * 1.05
    assert left < shards * 1.05
