"""Gradients accumulated over several backwards, inside and outside of ``no_sync``.

Each test is named after that of the document. A run is a list of phases ``(no_sync, backwards)``.
What is expected is the mean over the ranks of the gradient of all batches at once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.tensor import Partial
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer

from composable_shard.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from seeds.models import (
    CPU,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    transformer,
    two_of,
)

Phases = list[tuple[bool, int]]
Batch = tuple[torch.Tensor, ...]

INSIDE_FIRST: Phases = [(True, 3), (False, 3), (True, 3)]
OUTSIDE_FIRST: Phases = [(False, 3), (True, 3), (False, 3)]
PREFETCHES = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
BATCH_DIM = 1


def batches_of(model: Any, num_batches: int) -> list[Batch]:
    """Return batches that differ from one another and between ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    first: Batch = model.get_input(CPU)
    batches = [first]
    while len(batches) < num_batches:
        mixed = (t.flatten()[torch.randperm(t.numel(), generator=generator)] for t in first)
        batches.append(tuple(new.view_as(t) for new, t in zip(mixed, first, strict=True)))
    flat = [torch.cat([t.flatten() for t in batch]) for batch in batches]
    assert not any(torch.equal(x, y) for i, x in enumerate(flat) for y in flat[:i])
    return batches


def backward(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model.get_loss(batch, model(*batch))
    loss.backward()
    return loss.detach()


def accumulate(model: Any, batches: list[Batch], phases: Phases) -> torch.Tensor:
    """Run the phases; check how far gradients have come after each backward."""
    left = iter(batches)
    losses = []
    for no_sync, num_backwards in phases:
        for _ in range(num_backwards):
            with model.no_sync() if no_sync else contextlib.nullcontext():
                losses.append(backward(model, next(left)))
            partial = {
                any(isinstance(placement, Partial) for placement in param.grad.placements)
                for param in model.parameters()
            }
            assert partial == {no_sync}
    assert next(left, None) is None
    return torch.stack(losses).sum()


def run(phases: Phases, **kwargs: Any) -> None:
    plain, reference = two_of(transformer())
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer}),
        device_id=CPU,
        **kwargs,
    )
    assert len(FSDP.fsdp_modules(model)) == 5
    batches = batches_of(reference, sum(count for _, count in phases) + 1)
    ends_inside = phases[-1][0]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, reference)
    ]
    for _ in range(2):
        # What is accumulated without sync is reduced by the next backward with it.
        last = [(False, 1)] if ends_inside else []
        used = batches if ends_inside else batches[:-1]
        loss = accumulate(model, used, phases + last)
        at_once = tuple(torch.cat(parts, dim=BATCH_DIM) for parts in zip(*used, strict=True))
        torch.testing.assert_close(loss, backward(reference, at_once))
        average_gradients(reference)
        # Sums of gradients up to some hundreds, added in another order.
        assert_same_gradients(model, reference, rtol=1e-5, atol=2e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference, rtol=1e-5, atol=1e-5)


phases = pytest.mark.parametrize("phases", [INSIDE_FIRST, OUTSIDE_FIRST], ids=["inside", "outside"])


@pytest.mark.brief(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("use_orig_params", [False, True])
@phases
@on_ranks(2)
def test_grad_acc(
    phases: Phases, use_orig_params: bool, prefetch: Any, strategy: ShardingStrategy
) -> None:
    run(
        phases,
        use_orig_params=use_orig_params,
        backward_prefetch=prefetch,
        sharding_strategy=strategy,
    )


@pytest.mark.brief(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_grad_acc_cpu_offload(
    use_orig_params: bool, prefetch: Any, strategy: ShardingStrategy
) -> None:
    run(
        [(True, 3)],
        use_orig_params=use_orig_params,
        backward_prefetch=prefetch,
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload_params=True),
    )


@pytest.mark.brief(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@phases
@on_ranks(2)
def test_grad_acc_cpu_offload_without_no_sync(phases: Phases, strategy: ShardingStrategy) -> None:
    run(phases, sharding_strategy=strategy, cpu_offload=CPUOffload(offload_params=True))


@pytest.mark.brief(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_grad_acc_step_without_sync(strategy: ShardingStrategy) -> None:
    """Take a step although the last backward was inside: the gradients count as their mean."""
    plain, reference = two_of(transformer())
    model = FSDP(plain, sharding_strategy=strategy, device_id=CPU)
    batches = batches_of(reference, 3)
    accumulate(model, batches, [(False, 1), (True, 2)])
    for batch in batches:
        backward(reference, batch)
    average_gradients(reference)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    torch.optim.SGD(reference.parameters(), lr=0.01).step()
    assert_same_parameters(model, reference, rtol=1e-5, atol=1e-5)
