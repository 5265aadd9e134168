"""Models on the meta device with tied tensors: what the model has that never was there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeds.models import (
    CPU,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
)
from torch import nn

from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.compat.fsdp1 import ModuleWrapPolicy, ShardingStrategy, construction

FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD

# Every module fills what it has in another way.
FIRST = {"Tokens": 1, "Layer": 2, "Head": 3}


def fill(module: nn.Module, shift: float = 0) -> None:
    """Initialize a module as its ``reset_parameters()`` does, plus ``shift``."""
    for tensor in (*module.parameters(False), *module.buffers(False)):
        values = torch.arange(tensor.numel()).view(tensor.shape) / 8
        tensor.data.copy_(values + FIRST[type(module).__name__] + shift)


class Tokens(nn.Embedding):
    reset_parameters = fill


class Layer(nn.Linear):
    reset_parameters = fill


class Head(nn.Linear):
    reset_parameters = fill


class Model(nn.Module):
    """One weight in three modules at different depths, beside a bias in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens(4, 4)
        self.body = nn.Sequential(Layer(4, 4), Layer(4, 4))
        self.head = Head(4, 4, bias=False)
        self.head.weight = self.body[1].weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(x)))

    def tied(self) -> list[nn.Parameter]:
        return [_inside(m).weight for m in (self.tokens, _inside(self.body)[1], self.head)]


def _inside(module: Any) -> Any:
    return module.module if isinstance(module, FSDP) else module


def by_policy(kinds: set[type[nn.Module]]) -> Callable[..., Any]:
    return lambda model, **kwargs: FSDP(
        model, auto_wrap_policy=ModuleWrapPolicy(kinds) if kinds else None, **kwargs
    )


def by_hand(model: Any, **kwargs: Any) -> Any:
    """Wrap the last module first."""
    model.head = FSDP(model.head, **kwargs)
    model.body = FSDP(model.body, **kwargs)
    return FSDP(model, **kwargs)


WAYS: dict[str, Callable[..., Any]] = {
    "none": by_policy(set()),
    "first": by_policy({Tokens}),
    "middle": by_policy({nn.Sequential}),
    "last": by_policy({Head}),
    "deep": by_policy({Layer, Head}),
    "nested": by_policy({Layer, nn.Sequential}),
    "all": by_policy({Tokens, Layer, Head, nn.Sequential}),
    "hand": by_hand,
}


def assert_trains_as(model: Any, plain: Any, reference: Model) -> None:
    """Compare a wrapped model with the one that never was on the meta device, and train both."""
    weights = plain.tied()
    assert weights[1] is weights[0] and weights[2] is weights[0]
    assert_same_parameters(model, reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, reference)]
    for step in range(2):
        batch = torch.tensor([step, dist.get_rank()])
        for either in (model, reference):
            either(batch).sum().backward()
        average_gradients(reference)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize(
    ("num_ranks", "strategy"), [(2, FULL_SHARD), (2, NO_SHARD), (1, FULL_SHARD)]
)
@pytest.mark.parametrize("how", ["reset", "function", "synced"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks("num_ranks")
def test_tied_parameters(way: str, how: str, strategy: ShardingStrategy) -> None:
    with torch.device("meta"):
        plain = Model()

    def init_fn(module: nn.Module) -> None:
        if type(module).__name__ in FIRST:
            module.to_empty(device=CPU, recurse=False)
            fill(module, shift=dist.get_rank() if how == "synced" else 0)

    model = WAYS[way](
        plain,
        param_init_fn=None if how == "reset" else init_fn,
        sync_module_states=how == "synced",
        sharding_strategy=strategy,
        device_id=CPU,
    )
    assert_trains_as(model, plain, Model())


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_tied_parameters_that_only_the_first_rank_has(way: str) -> None:
    rank, reference = dist.get_rank(), Model()
    with torch.device("meta" if rank else "cpu"):
        plain = Model()
    with torch.no_grad():
        for either in (reference, plain):
            for param in either.parameters():
                param.mul_(2)
    model = WAYS[way](
        plain,
        param_init_fn=partial(nn.Module.to_empty, device=CPU, recurse=False) if rank else None,
        sync_module_states=True,
        device_id=CPU,
    )
    assert_trains_as(model, plain, reference)


class Tables(nn.Sequential):
    """Two layers that share a buffer."""

    def __init__(self) -> None:
        super().__init__(Layer(2, 2), Layer(2, 2))
        for layer in self:
            layer.register_buffer("table", torch.zeros(3) if layer is self[0] else self[0].table)


@on_ranks(2)
def test_tied_buffers_and_what_is_tied_is_let_go() -> None:
    for kinds in (set(), {Layer}):
        with torch.device("meta"):
            plain = Tables()
        by_policy(kinds)(plain, device_id=CPU)
        first, second = (_inside(module).table for module in plain)
        assert first is second
        assert first.tolist() == [2, 2.125, 2.25]
    with torch.device("meta"):
        model = Model()
    before = set(map(weakref.ref, model.parameters()))
    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Tokens, Layer, Head}), device_id=CPU)
    assert [one for one in before if one() is not None] == []
    gc.collect()  # what other tests have left
    assert list(construction._real) == []
