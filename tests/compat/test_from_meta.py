"""Models on the meta device: what is initialized, how often, in which order, and what is not.

The oracles are FullyShardedDataParallel of torch and the model that was never on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
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
from composable_shard.compat.fsdp1 import ModuleWrapPolicy


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


IGNORED = {
    "modules": lambda norm: {"ignored_modules": [norm]},
    "states": lambda norm: {"ignored_states": iter([norm])},
    "params": lambda norm: {"ignored_states": norm.parameters()},
}


@pytest.mark.parametrize("init_fn", [None, init_all])
@pytest.mark.parametrize("ignored", IGNORED)
@on_ranks(2)
def test_what_is_ignored_stays_as_it_is(
    ignored: str, init_fn: Callable[[nn.Module], None] | None
) -> None:
    """On the meta device, and with the values of its rank where others are synchronized."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    def kept(norm: nn.Module) -> list[torch.Tensor]:
        return [*norm.parameters(), *(norm.buffers() if ignored != "params" else ())]

    def wrap(norm: nn.Module, **more: Any) -> None:
        policy = ModuleWrapPolicy({nn.Linear})
        kwargs = {"auto_wrap_policy": policy, "param_init_fn": init_fn, "device_id": CPU}
        FSDP(model, **kwargs, **IGNORED[ignored](norm), **more)

    model = on_meta(make)
    norm: Any = model[1][1]
    before = kept(norm)
    wrap(norm)
    assert all(a is b and a.is_meta for a, b in zip(before, kept(norm), strict=True))
    others = [p for name, p in model.named_parameters() if not name.startswith("1.1.")]
    assert len(others) == 4
    assert all(isinstance(p, DTensor) and not p.is_meta for p in others)
    rank, model = dist.get_rank(), make()
    norm = model[1][1]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(rank + 1)
    wrap(norm, sync_module_states=True)
    for tensor in kept(norm):
        assert tensor.unique().tolist() == [rank + 1]
    for name, param in model.named_parameters():
        assert name.startswith("1.1.") or full(param).unique().tolist() == [1]


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


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", ["reset", "function", "synced"])
@pytest.mark.parametrize(
    "kinds", [{Tokens}, {Head}, {Layer, nn.Sequential}], ids=["first", "last", "nested"]
)
@on_ranks("num_ranks")
def test_tied_parameters(kinds: set[type[nn.Module]], how: str) -> None:
    def init_fn(module: nn.Module) -> None:
        if type(module).__name__ in FIRST:
            module.to_empty(device=CPU, recurse=False)
            fill(module, shift=dist.get_rank() if how == "synced" else 0)

    plain, reference = on_meta(Model), Model()
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy(kinds),
        param_init_fn=None if how == "reset" else init_fn,
        sync_module_states=how == "synced",
        device_id=CPU,
    )
    weights = plain.tied()
    assert weights[1] is weights[0] and weights[2] is weights[0]
    assert_same_parameters(model, reference)
    for either in (model, reference):
        either(torch.tensor([1, dist.get_rank()])).sum().backward()
    average_gradients(reference)
    assert_same_gradients(model, reference)
