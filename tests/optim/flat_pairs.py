"""Two equal nets with optimizers, of which one steps flat buffers, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import fully_shard
from composable_shard.optim import flat

Make = Callable[..., torch.optim.Optimizer]
optim: Any = torch.optim

MAKES: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=0.003),
    "momentum": partial(optim.SGD, lr=0.003, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(optim.SGD, lr=0.003, momentum=0.9, nesterov=True, foreach=True),
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": partial(optim.AdamW, lr=0.01),
    "adamw foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw, lr tensor": partial(optim.AdamW, lr=torch.tensor(0.01)),
    "radam": partial(optim.RAdam, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01, foreach=True),
    "adamax": partial(optim.Adamax, lr=0.01),
    "adadelta": partial(optim.Adadelta),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "adagrad foreach": partial(optim.Adagrad, lr=0.1, foreach=True),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "asgd": partial(optim.ASGD, lr=0.01),
}


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(9, 1801, dtype=dtype), nn.Linear(1801, 9, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Net(nn.Module):
    """Parameters in messages of their own and packed, uneven ones, rows for one rank, a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.few = nn.Parameter(torch.ones(1, 9, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if not (self.skips and number == 1):
                x = x + block(x)
        return x * self.few * (1 if self.skips else self.scale)


def sharded(net: nn.Module, **options: Any) -> Any:
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(net, **options)


def pair(
    make: Make,
    dtype: torch.dtype = torch.float32,
    *,
    is_one_group: bool = False,
    **options: Any,
) -> list[tuple[Any, Any]]:
    """Two sharded nets with optimizers; the second one's steps flat buffers.

    With all parameters in one group, those of each buffer are one tensor; else each is by itself.
    """
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(sharded(Net(dtype), **options))
    optimizers = [make(net.parameters() if is_one_group else groups(net)) for net in nets]
    assert flat(optimizers[1]) is optimizers[1]
    return list(zip(nets, optimizers, strict=True))


def stepping(loss: Callable[[Any, int], torch.Tensor], num_steps: int) -> Callable[..., None]:
    def run(net: Any, optimizer: Any) -> None:
        for step in range(num_steps):
            loss(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def two_ways(
    build: Callable[[], Any], make: Make, run: Callable[..., None], wraps: Any = flat
) -> list[str]:
    """Run equal nets with a stock optimizer and with a flat one; return what differs."""
    pairs = []
    for wrap in (lambda one: one, wraps):
        torch.manual_seed(0)
        net = build()
        optimizer = wrap(make(net.parameters()))
        run(net, optimizer)
        pairs.append((net, optimizer))
    return differences(pairs)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay, as usual, between weights with it."""
    params = dict(net.named_parameters())
    weights = [param for name, param in params.items() if "bias" not in name]
    biases = [param for name, param in params.items() if "bias" in name]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


def train(net: Any, optimizer: Any, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        net.skips = step % 3 == 1
        random = torch.Generator().manual_seed(10 * step + dist.get_rank())
        net(torch.randn(3, 9, generator=random).to(dtype)).square().mean().backward()
        for group in optimizer.param_groups:  # as a scheduler does
            group["lr"] = group["lr"] * 0.9
        optimizer.step()
        optimizer.zero_grad()


def differences(pairs: list[tuple[Any, Any]]) -> list[str]:
    """Compare parameters and all states, bit by bit."""
    (one, stock), (other, ours) = pairs
    found = []
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        if not same(a.detach(), b.detach()) or not local_of(a).isfinite().all():
            found.append(name)
    theirs, mine = stock.state_dict(), ours.state_dict()
    if theirs["param_groups"] != mine["param_groups"]:
        found.append("param_groups")
    if theirs["state"].keys() != mine["state"].keys():
        return [*found, f"states of {theirs['state'].keys()} and of {mine['state'].keys()}"]
    for key, state in theirs["state"].items():
        if state.keys() != mine["state"][key].keys():
            found.append(f"{key}: {list(state)} and {list(mine['state'][key])}")
            continue
        for name, value in state.items():
            if not same(value, mine["state"][key][name]):
                found.append(f"{key}: {name}")
    return found


def local_of(tensor: Any) -> torch.Tensor:
    own: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own


def same(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return bool(value == other)
    if type(value) is not type(other) or value.dtype != other.dtype or value.shape != other.shape:
        return False
    if isinstance(value, DTensor):
        is_alike = value.placements == other.placements
        return is_alike and torch.equal(value.to_local(), other.to_local())
    return torch.equal(value, other)
