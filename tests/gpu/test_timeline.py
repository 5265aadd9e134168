"""Timelines on a CUDA device: what the device did, without waiting for it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from composable_shard import fully_shard, trace
from composable_shard.insight.trace import merge

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 50_000_000  # tens of milliseconds, far more than the host takes to launch it


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return self.linear(x)


def test_spans_are_what_the_device_did_and_nothing_waits_for_it(
    nccl_rank: None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), Sleepy()).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(8, 64, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(SLEEP_CYCLES)
    end.record()
    torch.cuda.synchronize()
    with trace(model, tmp_path) as timeline:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                model(x).sum().backward()
                timeline.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    recorded = timeline.recorded
    assert recorded is not None and recorded.memory_of == "device"
    for before, after in itertools.pairwise(recorded.spans):
        assert before.end <= after.start
    asleep = [span for span in recorded.spans if (span.kind, span.name) == ("forward", "1")]
    slept = sum(span.end - span.start for span in asleep) / 1e6
    assert slept > start.elapsed_time(end)  # twice as long, at clock rates that are never constant
    assert min(sample.nbytes for sample in recorded.memory) > 0
    assert merge(tmp_path).summary["num_steps"] == 2
