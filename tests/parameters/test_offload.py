"""Parameters, gradients and optimizer states on the CPU, all of them or some."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, gradient_differences
from on_ranks import on_ranks
from torch import nn

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from composable_shard.policy import _warn_not_pinned
from composable_shard.testing import ParamSpec, TreeSpec, assert_trains_like_unsharded, fake_ranks

UNPINNED = CPUOffloadPolicy(pin_memory=False)


TREE = TreeSpec(
    (ParamSpec((5,)), ParamSpec(())),
    (TreeSpec((ParamSpec((5, 2), dim=1), ParamSpec((7, 3)), ParamSpec((2,), trainable=False))),),
)
PROGRAM: list[Any] = [
    *("backward", "step", "zero_grad", "accumulate", "backward", "step", "zero_grad"),
    *("backward", "backward", "step", "zero_grad", "backward", "accumulate", "backward", "step"),
]


@pytest.mark.brief(7)
@pytest.mark.parametrize(
    ("mesh", "reshard"),
    [
        *product([(2,), (2, 2), (1,), (3,)], [True, False]),
        *(((4,), reshard) for reshard in (2, True)),
    ],
)
def test_accumulation_with_and_without_sync(mesh: tuple[int, ...], reshard: bool | int) -> None:
    assert_trains_like_unsharded(
        TREE, PROGRAM, mesh=mesh, offload_policy=UNPINNED, reshard_after_forward=reshard
    )


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_mapping_offloads_what_it_names() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    oracle = Oracle(model)
    fully_shard(model, offload_policy={"0.weight": UNPINNED, "1.bias": OffloadPolicy()})
    kept = {param.name: param.offload for param in model._group().params}
    assert kept == {"0.weight": UNPINNED, "0.bias": None, "1.weight": None, "1.bias": None}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for either in (model, oracle.model):
        either(x).square().sum().backward()
    oracle.take()
    oracle.reduce()
    model.reshard()
    assert gradient_differences(dict(model.named_parameters()), oracle) == []


@on_ranks(2)
def test_mixed_precision() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 6)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mp_policy=policy, offload_policy=UNPINNED)
    model(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    states = [optimizer.state[param]["exp_avg"].to_local() for param in model.parameters()]
    assert {state.device.type for state in states} == {"cpu"}
    model.reshard()
    local = model.weight.grad.to_local()
    assert local.dtype == torch.float32
    assert local.device.type == model.weight.to_local().device.type == "cpu"


def test_without_an_accelerator_pinning_is_skipped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    _warn_not_pinned.cache_clear()
    with fake_ranks(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model: Any = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
            assert not model.weight.to_local().is_pinned()
    assert [str(one.message) for one in caught] == [
        "CPUOffloadPolicy(pin_memory=True) pins no memory: there is no accelerator to copy to; "
        "pass pin_memory=False to silence this warning"
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
