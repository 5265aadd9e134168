"""Streams, events and threads of a CUDA device: what the CPU can only pretend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_shard.core.transport import host
from composable_shard.testing import fake_ranks

pytestmark = pytest.mark.gpu

LONG = 200_000_000  # cycles of the device, some tenth of a second
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def blocks(depth: int = 2, width: int = 64, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
    )
    for block in model.cuda():
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


@pytest.mark.parametrize("policy", [None, LOW])
@pytest.mark.parametrize("make_event", [torch.cuda.Event, partial(torch.Event, "cuda")])
def test_an_optimizer_on_another_stream_is_waited_for(
    nccl_rank: None, make_event: Callable[[], Any], policy: MixedPrecisionPolicy | None
) -> None:
    model: Any = nn.Linear(8, 8, bias=False, device="cuda")
    fully_shard(model, mp_policy=policy)
    x = torch.ones(2, 8, device="cuda")
    with torch.no_grad():
        assert model(x).any()
        shard, event, side = model.weight.to_local(), make_event(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            shard.zero_()
            event.record(side)
        model.set_post_optim_event(event)
        assert not model(x).any()


def test_a_pinned_input_may_be_overwritten_when_forward_returns(nccl_rank: None) -> None:
    model: Any = fully_shard(nn.Linear(8, 8, bias=False, device="cuda"))
    x = torch.ones(2, 8, pin_memory=True)
    with torch.no_grad():
        expected = model(x).clone()
        torch.cuda._sleep(LONG)
        output = model(x)
        x.zero_()
    assert torch.equal(output, expected)


def test_offloaded_shards_may_be_written_when_forward_returns(nccl_rank: None) -> None:
    model: Any = fully_shard(nn.Linear(8, 8, bias=False), offload_policy=CPUOffloadPolicy())
    x = torch.ones(2, 8, device="cuda")
    with torch.no_grad():
        expected = model(x).clone()
        torch.cuda._sleep(LONG)
        output = model(x)
        model.weight.to_local().zero_()
    assert torch.equal(output, expected)


def test_offloaded_gradients_may_be_read_when_backward_returns(nccl_rank: None) -> None:
    model: Any = fully_shard(nn.Linear(8, 8, bias=False), offload_policy=CPUOffloadPolicy())
    x = torch.ones(2, 8, device="cuda")
    for _ in range(2):
        loss = model(x).sum()
        torch.cuda._sleep(LONG)
        loss.backward()
        local = model.weight.grad.to_local()
        assert local.is_pinned() and torch.equal(local, torch.full((8, 8), 2.0))
        model.zero_grad()


def test_offloaded_shards_are_copied_beside_compute(nccl_rank: None) -> None:
    model: Any = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    model.unshard()
    model.reshard()
    torch.cuda.synchronize()
    handle = model.unshard(async_op=True)
    torch.cuda._sleep(LONG)
    (copies,) = host.uploads.values()
    assert copies.is_busy
    copies.synchronize()
    assert not torch.cuda.current_stream().query()
    handle.wait()


@pytest.mark.parametrize("policy", [None, LOW])
def test_offloaded_training_is_that_on_the_device(
    nccl_rank: None, policy: MixedPrecisionPolicy | None
) -> None:
    there = blocks(mp_policy=policy)
    here: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in there))
    with torch.no_grad():
        for mine, other in zip(here.parameters(), there.parameters(), strict=True):
            mine.copy_(other.to_local())
    for block in here:
        fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(here, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (here, there)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 64, device="cuda")
        for model, optimizer in zip((here, there), optimizers, strict=True):
            for _ in range(2):  # the second gradient is added on the host
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(here.parameters(), there.parameters(), strict=True):
            assert mine.to_local().device.type == "cpu"
            assert torch.equal(mine.to_local(), other.to_local().cpu())


@pytest.mark.parametrize("policy", [None, LOW])
def test_gradients_are_packed_by_one_kernel_for_each_group(
    policy: MixedPrecisionPolicy | None,
) -> None:
    with fake_ranks(4):
        model = blocks(mp_policy=policy)
        x = torch.ones(2, 64, device="cuda")
        model(x).sum().backward()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as seen:
            model(x).sum().backward()
            torch.cuda.synchronize()
    kernels = [event.name for event in seen.events()]
    assert sum("chunk_cat_cuda_kernel" in name for name in kernels) == len(model)


def test_a_backward_on_another_stream_accumulates_there() -> None:
    with fake_ranks(4), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, x = blocks(mp_policy=LOW), torch.ones(2, 64, device="cuda")
        side = torch.cuda.Stream()
        for stream in (torch.cuda.current_stream(), side, side, torch.cuda.current_stream()):
            stream.wait_stream(side)
            with torch.cuda.stream(stream):
                model(x).sum().backward()
            side.wait_stream(stream)
    assert [str(one.message) for one in caught if "AccumulateGrad" in str(one.message)] == []


def test_the_step_after_a_failed_backward_is_that_of_the_unsharded_model(nccl_rank: None) -> None:
    model = blocks()
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in model)).cuda()
    with torch.no_grad():
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.copy_(mine.to_local())
    kept = []

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in a node")

    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 64, device="cuda", requires_grad=True)
        if step == 1:
            x.register_hook(fail)
            with pytest.raises(ValueError, match="in a node") as caught:
                model(x).square().sum().backward()
            kept.append(caught)
            model.zero_grad()
            continue
        for one in (model, plain):
            one.zero_grad()
            one(x).square().sum().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), other.grad)
