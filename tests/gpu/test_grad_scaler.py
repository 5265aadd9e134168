"""What a device changes under a scaler: asynchrony, and gradients on the host beside it."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedGradScaler, fully_shard
from composable_shard.testing import fake_ranks

pytestmark = pytest.mark.gpu


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers)).cuda()


def shard(model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def local(tensor: Any) -> torch.Tensor:
    return tensor.detach().to_local()


def test_fp16_training_equals_the_unsharded_one(nccl_rank: None) -> None:
    reference = stack()
    policy = MixedPrecisionPolicy(torch.float16, torch.float16)
    model = shard(copy.deepcopy(reference), mp_policy=policy)
    settings = {"init_scale": 2.0**24, "growth_interval": 3}
    scalers = torch.amp.GradScaler("cuda", **settings), ShardedGradScaler(**settings)
    assert scalers[1].is_enabled()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (reference, model)]
    scales = []
    for step in range(16):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()
        low = copy.deepcopy(reference).half()
        scalers[0].scale(low(batch.half()).float().square().mean()).backward()
        for param, lowered in zip(reference.parameters(), low.parameters(), strict=True):
            param.grad = lowered.grad.float()
        scalers[1].scale(model(batch).float().square().mean()).backward()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(local(param), other.detach())
        assert scalers[1].state_dict() == scalers[0].state_dict()
        scales.append(scalers[1].get_scale())
    assert scales[0] == 2.0**23  # the first step overflowed


def test_unscaling_does_not_wait_for_the_device() -> None:
    with fake_ranks(4):
        model = shard(stack())
        scaler = ShardedGradScaler()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        torch.cuda.synchronize()
        for step in range(3):
            loss = model(torch.ones(4, 64, device="cuda")).sum()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as waits:
                    warnings.simplefilter("always")
                    scaler.scale(loss).backward()
                    if step % 2:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)  # this optimizer skips on the device
                    scaler.update()
                    optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if step:  # the first compares the ranks
                assert [str(wait.message) for wait in waits] == []


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("every", [True, False])
def test_offloaded_gradients_are_looked_into_on_the_host(
    nccl_rank: None, every: bool, value: float
) -> None:
    model = stack()
    offload: Any = CPUOffloadPolicy() if every else {"weight": CPUOffloadPolicy()}
    for layer in (layer for block in model for layer in block.children()):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, offload_policy=offload)
    weight: Any = model[1][0].weight
    scaler = ShardedGradScaler(init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(2, 64, device="cuda")).sum()).backward()
    assert weight.grad.to_local().device.type == "cpu"
    before, grad = local(weight).clone(), local(weight.grad)
    expected = before - grad / 4
    grad[0, 0] *= value
    scaler.step(optimizer)
    scaler.update()
    finite = math.isfinite(value)
    assert torch.equal(local(weight), expected if finite else before)
    assert scaler.get_scale() == (4.0 if finite else 2.0)
