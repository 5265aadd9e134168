"""Ranks whose losses reach other parts of a model, all of which ran on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import assert_trains_like_unsharded, fake_ranks, run_ranks

WIDTH = 4
Build = Callable[[], nn.Module]


class Scale(nn.Module):
    """Has a parameter without dims, of which every rank has all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Twice(nn.Module):
    """Calls its parts one after the other, and all of them again."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (*self.parts, *self.parts):
            x = torch.tanh(part(x))
        return x


class Around(nn.Module):
    """Has a parameter of its own that it uses after its parts."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.parts(x) * self.weight
        return output


class InPlace(nn.Module):
    """Changes what its part gives: backward computes it again before it comes to the part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.part(x))


class Recomputed(nn.Module):
    """Computes its parts again in backward."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.parts, x, use_reentrant=False)
        return output


class Model(nn.Module):
    """Runs all of its parts; the output of some is used, the gradient of others goes past them."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, reached: str) -> torch.Tensor:
        x = self.first(x)
        for part, goes in zip(self.parts, reached, strict=True):
            output = part(x)
            x = output if goes == "+" else x + output.detach()
        return self.last(x)


def linear(*, trains: bool = True) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(trains)


def plain() -> nn.Module:
    return Model(linear(), linear(), linear())


def around_frozen() -> nn.Module:
    return Model(Around(linear(trains=False)), Around(linear(), linear(trains=False)), linear())


def frozen() -> nn.Module:
    return Model(linear(trains=False), linear(), linear(trains=False))


def scalars() -> nn.Module:
    return Model(Scale(), Scale(), linear())


def nested() -> nn.Module:
    return Model(Around(linear(), linear()), linear(), Around(Around(linear()), linear()))


def called_twice() -> nn.Module:
    return Model(linear(), Twice(linear(), linear(), linear()), linear())


def recomputed() -> nn.Module:
    return Model(
        Recomputed(InPlace()), Recomputed(linear(), linear(trains=False), linear()), linear()
    )


def shard_all(model: nn.Module, **options: Any) -> nn.Module:
    """Make each part with parameters of its own a group."""
    for module in reversed(list(model.modules())[1:]):
        if any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def shard_together(model: Any, **options: Any) -> nn.Module:
    """Make the first two parts one group, around groups of their own."""
    for part in model.parts:
        for inner in part.parts if isinstance(part, Around) else ():
            fully_shard(inner, **options)
    fully_shard(list(model.parts[:2]), **options)
    return fully_shard(model, **options)


@dataclass(frozen=True)
class Loss:
    """For each rank, which parts its loss reaches; the next step takes what the next rank took."""

    reached: tuple[str, ...]

    def __call__(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(2, WIDTH)
        output: torch.Tensor = model(x, self.reached[(step + rank) % len(self.reached)])
        return output.square().mean()


PROGRAMS = [
    ["backward", "step", "backward", "step"],
    ["accumulate", "sync", "step", "forward", "sync", "backward"],
    ["backward", "accumulate", "sync", "accumulate", "accumulate", "backward", "step"],
]


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
@pytest.mark.parametrize("build", [plain, frozen, scalars, nested, called_twice, recomputed])
def test_ranks_that_reach_other_parts_train_alike(build: Build, program: list[str]) -> None:
    reached = ("+++", "---", "+-+", "-+-")
    for ranks in (2, 3):
        assert_trains_like_unsharded(
            build, program, world_size=ranks, shard=shard_all, loss=Loss(reached), timeout=20
        )


def test_ranks_of_replicas_that_reach_other_scalars_train_alike() -> None:
    loss = Loss(("+++", "---", "+-+", "-+-"))
    for program in (PROGRAMS[-1], ["backward", "accumulate", "sync", "step"]):
        assert_trains_like_unsharded(
            scalars, program, mesh=(2, 2), shard=shard_all, loss=loss, timeout=20
        )


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_ranks_that_reach_other_modules_of_a_group_train_alike(program: list[str]) -> None:
    loss = Loss(("+++", "-++", "+-+"))
    for ranks in (2, 3):
        assert_trains_like_unsharded(
            around_frozen, program, world_size=ranks, shard=shard_together, loss=loss, timeout=20
        )


def test_a_module_that_is_called_twice_is_freed_when_its_first_call_is_over() -> None:
    with fake_ranks(2):
        model = shard_all(called_twice())
        loss = model(torch.ones(2, WIDTH), "+++").sum()
        with record_events(model) as events:  # type: ignore[arg-type]
            loss.backward()
    seen = [name for event, name in events if event == "reshard"]
    assert seen == [
        "last",
        "parts.2",
        "parts.1.parts.2",
        "parts.1.parts.1",
        "parts.1.parts.0",
        "parts.0",
        "first",
    ]


def changed_between() -> list[bool]:
    torch.manual_seed(0)
    model, alone = shard_all(plain()), plain()
    alone.load_state_dict({name: x.full_tensor() for name, x in model.state_dict().items()})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    x = torch.ones(2, WIDTH)
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        m(x, "+++").sum().backward()
        m(x, "+++").sum()  # perhaps it was not finite
        optimizer.step()
        optimizer.zero_grad()
        part, m.parts = m.parts[1], nn.ModuleList([m.parts[0], m.parts[2]])
        m(x, "++").sum().backward()
        m.parts = nn.ModuleList([m.parts[0], part, m.parts[1]])
    return [
        torch.allclose(got.grad.full_tensor(), wanted.grad)
        for got, wanted in zip(model.parameters(), alone.parameters(), strict=True)
        if wanted.grad is not None
    ]


def test_a_loss_that_was_let_go_does_not_keep_parameters_from_changing() -> None:
    """A part that the next loss skips, as layers that are dropped, was held against the change."""
    assert run_ranks(changed_between, 2) == [[True] * 8] * 2
