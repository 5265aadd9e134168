"""Ranks that share one GPU, through gloo: exact however late the device is."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks

pytestmark = pytest.mark.gpu

LONG = 20_000_000  # cycles of the device, some hundredths of a second
FP32 = {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)}


def train(extents: tuple[int, ...], options: dict[str, Any]) -> float:
    """Return the largest difference from a model that trains on the batches of all ranks."""
    names = ("replicate", "shard")[-len(extents) :]
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):  # the device of every rank
        mesh = init_device_mesh("cuda", extents, mesh_dim_names=names)
    blocks = [nn.Sequential(nn.LayerNorm(30), nn.Linear(30, 30), nn.Tanh()) for _ in range(4)]
    reference = nn.Sequential(*blocks).to("cuda", torch.float64)
    model = copy.deepcopy(reference)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (model, reference)]
    for _ in range(6):
        batch = torch.randn(mesh.size(), 4, 30, dtype=torch.float64, device="cuda")
        torch.cuda._sleep(LONG)
        loss = model(batch[torch.distributed.get_rank()]).double().square().mean()
        torch.cuda._sleep(LONG)
        loss.backward()
        reference(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    differences = []
    for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
        shard = param.to_local()
        chunks = whole.chunk(extents[-1])[mesh["shard"].get_local_rank() :]
        if options.get("sharding") == "hybrid":
            chunks = chunks[0].chunk(extents[0])[mesh["replicate"].get_local_rank() :]
        assert chunks or not shard.numel()
        differences += [(shard.cuda() - chunk).abs().max() for chunk in chunks[:1]]
    return torch.stack(differences).max().item()


@pytest.mark.parametrize("extents", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("options", [{}, FP32, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("offload", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=str)
def test_delays_change_nothing(
    extents: tuple[int, ...], options: dict[str, Any], offload: dict[str, Any]
) -> None:
    num_ranks = torch.Size(extents).numel()
    differences = run_ranks(train, num_ranks, extents, {**options, **offload})
    assert max(differences) < (1e-4 if options is FP32 else 1e-12)


@pytest.mark.parametrize(
    ("sharding", "extents"), [("zero1", (2,)), ("zero2", (2, 2)), ("hybrid", (2, 2))]
)
def test_delays_change_nothing_with_other_stages(sharding: str, extents: tuple[int, ...]) -> None:
    num_ranks = torch.Size(extents).numel()
    assert max(run_ranks(train, num_ranks, extents, {"sharding": sharding})) < 1e-12
