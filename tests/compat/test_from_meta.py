"""Models on the meta device: what is initialized, how often, in which order, and what is not.

The oracles are FullyShardedDataParallel of torch and the model that was never on the meta device.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from on_ranks import on_ranks
from seeds.models import CPU, assert_same_gradients, assert_same_parameters, average_gradients, full
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.compat.fsdp1 import ModuleWrapPolicy, ShardingStrategy, construction


class Block(nn.Module):
    """A weight of its own, drawn by the function that also a wrapper of it would hand out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def deep() -> nn.Sequential:
    """Deep modules come before shallow ones."""
    inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Block()), Block(), nn.LayerNorm(4))
    return nn.Sequential(inner, nn.Linear(4, 4), Block(), nn.Linear(4, 2))


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def initialized(
    wrapper: Any, policy: Any, kinds: set[type[nn.Module]], by_function: bool
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the modules that the function was called with, and the values of all parameters."""
    called: list[str] = []

    def init_fn(module: nn.Module) -> None:
        called.append(type(module).__name__)
        if hasattr(module, "reset_parameters"):
            module.to_empty(device=CPU, recurse=False)
            module.reset_parameters()

    plain = on_meta(deep)
    torch.manual_seed(7)
    model = wrapper(
        plain,
        auto_wrap_policy=policy(kinds) if kinds else None,
        param_init_fn=init_fn if by_function else None,
        device_id=CPU,
    )
    return called, {name: value.clone() for name, value in model.state_dict().items()}


KINDS: dict[str, set[type[nn.Module]]] = {
    "none": set(),
    "blocks": {Block},
    "linear": {nn.Linear},
    "leaves": {Block, nn.Linear, nn.LayerNorm},
    "nested": {Block, nn.Sequential},
}


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("wrapped", KINDS)
@on_ranks(2)
def test_modules_are_initialized_as_by_fsdp1_of_torch(wrapped: str, by_function: bool) -> None:
    kinds = KINDS[wrapped]
    ours = initialized(FSDP, ModuleWrapPolicy, kinds, by_function)
    theirs = initialized(
        torch_fsdp.FullyShardedDataParallel, torch_wrap.ModuleWrapPolicy, kinds, by_function
    )
    assert ours[0] == theirs[0]
    assert bool(ours[0]) == by_function
    assert list(ours[1]) == list(theirs[1])
    for name, value in ours[1].items():
        assert torch.equal(value, theirs[1][name]), name


def init_all(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


class Part(nn.Module):
    """A layer, and a norm with buffers that is to be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


class Parts(nn.Module):
    """Two parts, and a norm that is to be ignored beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Part(), Part())
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.parts(x))

    def norms(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, nn.BatchNorm1d)]


def states_of(modules: list[nn.Module], *, buffers: bool) -> list[torch.Tensor]:
    """Return the tensors that modules hold themselves."""
    kinds = [(m._parameters, m._buffers) if buffers else (m._parameters,) for m in modules]
    return [t for kind in kinds for held in kind for t in held.values() if t is not None]


IGNORED = {
    "modules": lambda model: {"ignored_modules": model.norms()},
    "states": lambda model: {"ignored_states": iter(model.norms())},
    "params": lambda model: {
        "ignored_states": (param for norm in model.norms() for param in norm.parameters())
    },
}


@pytest.mark.parametrize("init_fn", [None, init_all])
@pytest.mark.parametrize("kinds", [set(), {Part}], ids=["flat", "nested"])
@pytest.mark.parametrize("ignored", IGNORED)
@on_ranks(2)
def test_what_is_ignored_stays_as_it_is(
    ignored: str, kinds: set[type[nn.Module]], init_fn: Callable[[nn.Module], None] | None
) -> None:
    """On the meta device, and with the values of its rank where others are synchronized."""
    policy = ModuleWrapPolicy(kinds) if kinds else None
    model = on_meta(Parts)
    norms, with_buffers = model.norms(), ignored != "params"
    before = states_of(norms, buffers=with_buffers)
    kwargs = {"auto_wrap_policy": policy, "param_init_fn": init_fn, "device_id": CPU}
    FSDP(model, **kwargs, **IGNORED[ignored](model))
    after = states_of(norms, buffers=with_buffers)
    assert len(after) == 3 * (5 if with_buffers else 2)
    assert all(a is b and a.is_meta for a, b in zip(before, after, strict=True))
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    assert len(others) == 4
    assert all(isinstance(p, DTensor) and not p.is_meta for p in others)
    if not with_buffers:
        return
    rank, model = dist.get_rank(), Parts()
    norms = model.norms()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(rank + 1)
    FSDP(model, **kwargs, sync_module_states=True, **IGNORED[ignored](model))
    for tensor in states_of(norms, buffers=True):
        assert tensor.unique().tolist() == [rank + 1]
    for name, param in model.named_parameters():
        assert "norm" in name or full(param).unique().tolist() == [1]


@on_ranks(2)
def test_an_ignored_parameter_keeps_its_values_beside_one_on_the_meta_device() -> None:
    for init_fn in (None, init_all):
        layer = nn.Linear(4, 4)
        weight, values = layer.weight, layer.weight.detach().clone()
        layer.bias = nn.Parameter(torch.empty(4, device="meta"))
        FSDP(layer, ignored_states=[weight], param_init_fn=init_fn, device_id=CPU)
        assert layer.weight is weight and torch.equal(weight, values)
        assert isinstance(layer.bias, DTensor) and not layer.bias.is_meta


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
