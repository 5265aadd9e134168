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


def test_settings_hooks_and_attributes_are_copied() -> None:
    with fake_ranks(2):
        model = make()
        model.first.weight.tag = "mine"
        seen: list[nn.Module] = []
        dtypes: list[torch.dtype] = []
        model.first.register_forward_hook(lambda module, *_: seen.append(module))
        model.first.register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
        policy = MixedPrecisionPolicy(torch.bfloat16)
        shard_all(model, mp_policy=policy)
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        model.first.set_modules_to_forward_prefetch([model.last])  # type: ignore[operator]
        copied = copy.deepcopy(model)
        assert copied.first.weight.tag == "mine"
        with record_events(copied) as events, record_events(model) as others:
            copied(torch.ones(2, WIDTH)).float().sum().backward()
        assert [name for event, name in events if event == "pre_forward"] == [
            *("", "first", "norm, last", "norm, last")
        ]
        assert [name for event, name in events if event in ("all_gather", "post_forward")][:3] == [
            *("first", "norm, last", "first")  # prefetched
        ]
        assert [event for event, _ in events[-3:]] == ["wait_for_reduce_scatter"] + ["reshard"] * 2
        assert others == []
        assert seen == [copied.first] and dtypes == [torch.bfloat16]
        with record_events(model) as others:
            model(torch.ones(2, WIDTH)).float().sum().backward()
        assert others == events


def test_a_part_and_a_whole_around_can_be_copied() -> None:
    with fake_ranks(2):
        model = shard_all(make())
        part = copy.deepcopy(model.first)
        part(torch.ones(2, WIDTH)).sum().backward()
        assert model.first.weight.grad is None and part.weight.grad is not None
        around = copy.deepcopy(nn.ModuleDict({"a": model, "b": nn.Linear(2, 2)}))
        assert isinstance(around["a"], FSDPModule) and around["a"] is not model
        around["a"](torch.ones(2, WIDTH)).sum().backward()
        assert model.first.weight.grad is None
        state = around["a"].state_dict()
        model.load_state_dict(state)


class Counts(nn.Linear):
    """Wants to be told when its parameters are replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "heard" in self.__dict__:
            self.heard.append(type(value) is nn.Parameter)
        super().__setattr__(name, value)


@on_ranks(2)
def test_a_copy_of_a_module_with_its_own_setattr_is_told() -> None:
    model = Counts(WIDTH, WIDTH)
    fully_shard(model, reshard_after_forward=True)
    copied = copy.deepcopy(model)
    copied.__dict__["heard"] = []
    with torch.no_grad():
        copied(torch.ones(1, WIDTH))
    assert copied.heard == [True, False]


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_an_optimizer_is_copied_with_its_model_in_any_order(order: tuple[str, str]) -> None:
    with fake_ranks(2):
        model = fully_shard(nn.Linear(4, 4))
        both = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
        copied: Any = copy.deepcopy({name: both[name] for name in order})
        twin = copied["model"]
        before = twin.weight.to_local().clone()
        twin(torch.ones(2, 4)).sum().backward()
        copied["optimizer"].step()
        assert torch.equal(twin.weight.to_local(), before - 0.5 * twin.weight.grad.to_local())
        assert torch.equal(model.weight.to_local(), before)


class Trunk(nn.Module):
    """A sharded body below a head that the root's group owns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_plain_child_is_copied_without_its_group() -> None:
    """Copy a child of the root's group by itself; then it lives without the group."""
    torch.manual_seed(0)
    model = Trunk()
    whole = copy.deepcopy(model.head.state_dict())
    fully_shard(model.body)
    fully_shard(model)
    copied = copy.deepcopy(model.head)
    for name, param in copied.named_parameters():
        assert isinstance(param, DTensor) and param.is_leaf
        assert torch.equal(param.full_tensor(), whole[name])
    loaded = copied.load_state_dict({key: value * 2 for key, value in copied.state_dict().items()})
    assert loaded.missing_keys == [] and loaded.unexpected_keys == []
    for factor, module in ((2, copied), (1, model.head)):
        for name, value in module.state_dict().items():
            assert torch.equal(value.full_tensor(), factor * whole[name])
    twin = copy.deepcopy(model)  # with the group: hooks belong to the new one
    model(torch.ones(1, WIDTH)).sum().backward()
    twin.load_state_dict({key: value * 0 for key, value in model.state_dict().items()})
    assert all(not param.full_tensor().any() for param in twin.parameters())
    assert not twin(torch.ones(1, WIDTH)).any()
    for name, param in model.head.named_parameters():
        assert torch.equal(param.full_tensor(), whole[name])
