"""The peak that estimate tells is the peak that two ranks measure."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import Gpt, Spec
from live_storage import LiveStorage
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_shard import MixedPrecisionPolicy, apply_fully_shard, estimate
from composable_shard._torch import poisoned_memory
from composable_shard.insight.explain import is_repeated_block
from composable_shard.testing import run_ranks

BATCH, CONTEXT = 4, 64
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)


class Checkpointed(Gpt):
    """A GPT whose blocks are computed again in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)  # positions are not used: their gradient stays None
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


SMALL = partial(Gpt, Spec(layers=2, width=256))
UNEVEN = partial(Gpt, Spec(layers=2, width=192, context=65))
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int | tuple[int, int]]] = {
    "fp32": (SMALL, {}, 2),
    "checkpoints": (partial(Checkpointed, Spec(layers=2, width=256)), {}, 2),
    "rows that do not divide": (UNEVEN, {"reshard_after_forward": False}, 2),
    "bf16": (SMALL, {"mp_policy": BF16}, 2),
    "replicas": (SMALL, {}, (2, 1)),
    "ZeRO-2": (SMALL, {"sharding": "zero2"}, 2),
    "ZeRO-1": (SMALL, {"sharding": "zero1"}, 2),
    "hybrid": (SMALL, {"sharding": "hybrid", "mp_policy": BF16}, (2, 2)),
    "hybrid, uneven": (UNEVEN, {"sharding": "hybrid"}, (2, 1)),
}


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@poisoned_memory(False)  # which keeps memory for a while
def measure(
    build: Callable[[], nn.Module], kwargs: dict[str, Any], shape: int | tuple[int, int]
) -> tuple[int, int]:
    """Return the bytes that live between steps, and at the peak of a step."""
    names = ("replicate", "shard")
    mesh = (
        init_device_mesh("cpu", (shape,), mesh_dim_names=names[1:])
        if isinstance(shape, int)
        else init_device_mesh("cpu", shape, mesh_dim_names=names)
    )
    with LiveStorage() as live:
        model = build()
        apply_fully_shard(model, is_repeated_block(model), mesh=mesh, **kwargs)
        optimizer = OPTIMIZER(model.parameters())
        tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)

        def step() -> None:
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        gc.collect()
        dist.barrier()
        live.reset_peak()
        between = live.live()
        step()
    return between, live.peak


@pytest.mark.brief(3)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_is_measured(case: str) -> None:
    build, kwargs, shape = CASES[case]
    num_ranks = shape if isinstance(shape, int) else prod(shape)
    ranks = run_ranks(measure, num_ranks, build, kwargs, shape)
    tokens = torch.empty(BATCH, CONTEXT, dtype=torch.int64, device="meta")
    result = estimate(
        build, shape, None, tokens, loss=loss_of, optimizer=OPTIMIZER, device="cpu", **kwargs
    )
    between, peak = (max(bytes_) for bytes_ in zip(*ranks, strict=True))
    assert result.between_steps.total == pytest.approx(between, rel=0.001)
    assert result.peak.total == pytest.approx(peak, rel=0.001)
