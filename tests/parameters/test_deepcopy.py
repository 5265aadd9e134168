"""A deep copy of a sharded module is sharded, independent, and trains on its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, step_differences, value_differences
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from composable_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks

WIDTH = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def shard_all(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model.first, **options)
    fully_shard([model.norm, model.last], **options)
    return fully_shard(model, **options)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def train(model: nn.Module, oracle: Oracle, steps: range) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for step in steps:
        for either in (model, oracle.model):
            either(batch(step)).square().sum().backward()
        oracle.take()
        oracle.reduce()
        model.reshard()  # type: ignore[operator]
        assert step_differences(model, oracle, optimizers) == []


WHEN = ["before the first forward", "after training", "while unsharded"]


@pytest.mark.brief(2)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("ranks", "reshard"), [(4, 2), (1, None), (2, None), (3, None)])
@on_ranks("ranks")
def test_a_copy_and_its_source_train_independently(when: str, reshard: int | None) -> None:
    model = make()
    oracle = Oracle(model)
    shard_all(model, reshard_after_forward=reshard)
    if when != "before the first forward":
        train(model, oracle, range(2))
    if when == "while unsharded":
        model.unshard()  # type: ignore[operator]
    copied = copy.deepcopy(model)
    copied_oracle = Oracle(oracle.model)
    assert type(copied) is type(model) and isinstance(copied, FSDPModule)
    for (name, mine), (other_name, theirs) in zip(
        model.named_parameters(), copied.named_parameters(), strict=True
    ):
        assert isinstance(mine, DTensor) and isinstance(theirs, DTensor)
        assert (name, mine.placements) == (other_name, theirs.placements)
        own = mine.to_local()
        assert not own.numel() or own.data_ptr() != theirs.to_local().data_ptr(), name
    train(copied, copied_oracle, range(2, 5))
    assert value_differences(model.named_parameters(), oracle) == []  # untouched by that
    train(model, oracle, range(5, 7))
    assert value_differences(copied.named_parameters(), copied_oracle) == []


@pytest.mark.parametrize("use_foreach", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_an_exponential_moving_average(use_foreach: bool) -> None:
    """Average the parameters over steps, evaluate the average in between."""
    model = make()
    oracle = Oracle(model)
    shard_all(model)
    update: dict[str, Any] = {
        "avg_fn": None if use_foreach else lambda mean, new, _: 0.9 * mean + 0.1 * new,
        "multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9) if use_foreach else None,
    }
    means = [AveragedModel(m, **update) for m in (model, oracle.model)]
    for step in range(3):
        train(model, oracle, range(step, step + 1))
        for mean, one in zip(means, (model, oracle.model), strict=True):
            mean.update_parameters(one)
            mean.eval()
        with torch.no_grad():
            assert torch.allclose(*(mean(batch(9)) for mean in means), atol=1e-5), step


def test_settings_and_the_order_of_hooks_are_copied() -> None:
    with fake_ranks(2):
        model = make()
        dtypes: list[torch.dtype] = []
        model.first.register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
        shard_all(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        copied = copy.deepcopy(model)
        with record_events(copied) as events:
            copied(torch.ones(2, WIDTH)).float().sum().backward()
        assert dtypes == [torch.bfloat16]  # before the hook that frees it
        assert [event for event, _ in events[-3:]] == ["post_backward", "reshard", "reshard"]
