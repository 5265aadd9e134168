"""Parameters, gradients and optimizer states on the CPU, all of them or some."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, gradient_differences, step_differences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training.programs import TREE
from training.trees import build, inputs_for, shard

from composable_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from composable_shard.core.transport import host
from composable_shard.testing import fake_ranks, run_ranks

UNPINNED = CPUOffloadPolicy(pin_memory=False)


def train(syncs: tuple[bool, ...], hybrid: bool, reshard: bool | int) -> list[str]:
    """Accumulate with and without sync over microbatches, then step; three times."""
    model = build(TREE)
    oracle = Oracle(model)
    mesh = None
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard(model, TREE, mesh=mesh, offload_policy=UNPINNED, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle.model)]
    found: list[str] = []
    for step in range(3):
        for microbatch, sync in enumerate(syncs):
            x = inputs_for(len(syncs) * step + microbatch, dist.get_rank())
            with contextlib.nullcontext() if sync else model.no_sync():
                for either in (model, oracle.model):
                    either(x).square().mean().backward()
            oracle.take()
            if sync:
                oracle.reduce()
        found += step_differences(model, oracle, optimizers)
    states = [state["exp_avg"] for state in optimizers[0].state.values()]
    if not all(isinstance(s, DTensor) and s.to_local().device.type == "cpu" for s in states):
        found.append("optimizer states are elsewhere")
    return found


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("syncs", [(True,), (False, True), (True, True), (True, False, True)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_accumulation_with_and_without_sync(
    ranks: int, syncs: tuple[bool, ...], reshard: bool
) -> None:
    assert run_ranks(train, ranks, syncs, False, reshard, timeout=30) == [[]] * ranks


@pytest.mark.brief(1)
@pytest.mark.parametrize("reshard", [True, 2])
def test_on_other_meshes(reshard: bool | int) -> None:
    assert run_ranks(train, 4, (False, True), False, reshard, timeout=30) == [[]] * 4
    assert run_ranks(train, 4, (False, True), True, reshard, timeout=30) == [[]] * 4


def by_name() -> list[object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    oracle = Oracle(model)
    policy: Mapping[str, OffloadPolicy] = {"0.weight": UNPINNED, "1.bias": OffloadPolicy()}
    fully_shard(model, offload_policy=policy)
    group = model._group()  # type: ignore[operator]
    kept = {param.name: param.offload for param in group.params}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for either in (model, oracle.model):
        either(x).square().sum().backward()
    oracle.take()
    oracle.reduce()
    model.reshard()  # type: ignore[operator]
    return [kept, gradient_differences(dict(model.named_parameters()), oracle)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mapping_offloads_what_it_names(ranks: int) -> None:
    kept = {"0.weight": UNPINNED, "0.bias": None, "1.weight": None, "1.bias": None}
    assert run_ranks(by_name, ranks) == [[kept, []]] * ranks


def in_low_precision() -> list[object]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 6)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mp_policy=policy, offload_policy=UNPINNED)
    model(torch.ones(2, 4)).sum().backward()
    model.reshard()
    local = model.weight.grad.to_local()
    return [local.dtype, local.device.type, model.weight.to_local().device.type]


def test_mixed_precision() -> None:
    assert run_ranks(in_low_precision, 2) == [[torch.float32, "cpu", "cpu"]] * 2


def test_without_an_accelerator_pinning_is_skipped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    host._warn_not_pinned.cache_clear()
    with fake_ranks(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model: Any = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
            assert not model.weight.to_local().is_pinned()
    assert [str(one.message) for one in caught] == [
        "CPUOffloadPolicy(pin_memory=True) pins no memory: there is no accelerator to copy to; "
        "pass pin_memory=False to say so"
    ]


def test_from_the_meta_device() -> None:
    with fake_ranks(2):
        with torch.device("meta"):
            model: Any = nn.Linear(4, 4)
        fully_shard(model, offload_policy=UNPINNED)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1)
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad.to_local().shape == (2, 4)
