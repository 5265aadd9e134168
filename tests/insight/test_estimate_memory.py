"""The peak that estimate tells is the peak that two ranks measure."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
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
from composable_shard.insight.advice import is_repeated_block
from composable_shard.insight.estimate import Estimate
from composable_shard.testing import run_ranks

NUM_RANKS = 2
BATCH, CONTEXT = 4, 64
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)

CASES: dict[str, tuple[Spec, dict[str, Any], int | tuple[int, int]]] = {
    "fp32": (Spec(layers=2, width=256), {}, 2),
    "bf16": (Spec(layers=2, width=256), {"mp_policy": BF16}, 2),
    "replicas": (Spec(layers=2, width=256), {}, (2, 1)),
}


class Checkpointed(Gpt):
    """A GPT whose blocks are computed again in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)  # positions are not used: their gradient stays None
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


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


def told(
    build: Callable[[], nn.Module], kwargs: dict[str, Any], shape: int | tuple[int, int]
) -> Estimate:
    tokens = torch.empty(BATCH, CONTEXT, dtype=torch.int64, device="meta")
    return estimate(
        build, shape, None, tokens, loss=loss_of, optimizer=OPTIMIZER, device="cpu", **kwargs
    )


@pytest.mark.brief(1)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_within_a_tenth(case: str) -> None:
    spec, kwargs, shape = CASES[case]
    compare(partial(Gpt, spec), kwargs, shape)


def test_the_peak_with_activation_checkpoints() -> None:
    compare(partial(Checkpointed, Spec(layers=2, width=256)), {}, 2)


def test_the_peak_where_rows_do_not_divide() -> None:
    compare(
        partial(Gpt, Spec(layers=2, width=192, context=65)), {"reshard_after_forward": False}, 2
    )


def compare(
    build: Callable[[], nn.Module], kwargs: dict[str, Any], shape: int | tuple[int, int]
) -> None:
    ranks = run_ranks(measure, NUM_RANKS, build, kwargs, shape)
    result = told(build, kwargs, shape)
    between, peak = (max(bytes_) for bytes_ in zip(*ranks, strict=True))
    assert result.between_steps.total == pytest.approx(between, rel=0.01)
    assert result.peak.total == pytest.approx(peak, rel=0.1)
