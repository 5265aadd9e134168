"""Ranks whose losses reach other parts of a model, all of which ran on all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
@pytest.mark.parametrize("build", [plain, frozen, scalars, nested, called_twice, recomputed])
def test_ranks_that_reach_other_parts_train_alike(
    build: Build, program: list[str], ranks: int
) -> None:
    reached = ("+++", "---", "+-+", "-+-")
    assert_trains_like_unsharded(
        build, program, world_size=ranks, shard=shard_all, loss=Loss(reached), timeout=20
    )


def test_ranks_of_replicas_that_reach_other_scalars_train_alike() -> None:
    loss = Loss(("+++", "---", "+-+", "-+-"))
    for program in (PROGRAMS[-1], ["backward", "accumulate", "sync", "step"]):
        assert_trains_like_unsharded(
            scalars, program, mesh=(2, 2), shard=shard_all, loss=loss, timeout=20
        )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_ranks_that_reach_other_modules_of_a_group_train_alike(
    program: list[str], ranks: int
) -> None:
    loss = Loss(("+++", "-++", "+-+"))
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


class Pair(nn.Module):
    """Uses one of its two parameters, both, or none with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        a = self.a if "a" in used else self.a.detach()
        b = self.b if "b" in used else self.b.detach()
        return torch.tanh(x @ a + b)


class Towers(nn.Module):
    """Adds up parts, of which some read their input detached, so that nothing goes on behind them.

    In every step the parts run in another order.
    """

    def __init__(self, detached: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({name: Pair() for name in "pqrs"})
        self.detached = detached

    def forward(self, x: torch.Tensor, used: str, order: str) -> torch.Tensor:
        x = self.first(x)
        uses = dict(zip("pqrs", used.split(), strict=True))
        for name in order:
            output = self.parts[name](x.detach() if name in self.detached else x, uses[name])
            x = x + (output.detach() if uses[name] == "-" else output)
        return x


@dataclass(frozen=True)
class TowerLoss:
    """For each rank, what of each part its loss reaches: ``-`` nothing, ``0`` no parameter."""

    used: tuple[str, ...]

    def __call__(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        used = self.used[(step + rank) % len(self.used)]
        order = ("pqrs", "pqrs", "srqp", "qsp", "rq")[step % 5]
        output: torch.Tensor = model(torch.randn(2, WIDTH), used, order)
        return output.square().mean()


TOWERS = [
    ("ab ab ab -", "ab ab ab a"),
    ("- - - -", "a b a b", "ab - b 0"),
    ("a - b 0", "0 b - a", "- - ab ab"),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("detached", ["s", "pqrs", "qs", ""])
@pytest.mark.parametrize("used", TOWERS, ids=" | ".join)
def test_ranks_that_use_other_parameters_of_parts_without_an_input_gradient_train_alike(
    used: tuple[str, ...], detached: str, ranks: int
) -> None:
    program = ["backward", "step", "backward", "step", "accumulate", "backward", "step", "backward"]
    assert_trains_like_unsharded(
        partial(Towers, detached),
        program,
        world_size=ranks,
        shard=shard_all,
        loss=TowerLoss(used),
        timeout=60,
    )


class Recomputing(nn.Module):
    """Computes segments of layers again in backward; gives what every layer of a segment gives."""

    def __init__(self, sizes: tuple[int, ...], use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.segments = nn.ModuleList(
            nn.ModuleList(linear() for _ in range(size)) for size in sizes
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor, reached: str) -> torch.Tensor:
        x = self.first(x)
        for segment, marks in zip(self.segments, reached.split(), strict=True):

            def layers(x: torch.Tensor, segment: Any = segment) -> tuple[torch.Tensor, ...]:
                outputs = []
                for layer in segment:
                    x = torch.tanh(layer(x))
                    outputs.append(x)
                return tuple(outputs)

            outputs = checkpoint(layers, x, use_reentrant=self.use_reentrant)
            for output, mark in zip(outputs, marks, strict=True):
                x = x + (output if mark == "+" else output.detach())
        return self.last(x)


SEGMENTS = [
    ((3,), ("---", "+++")),
    ((3,), ("+--", "--+", "-+-")),
    ((1, 4, 1), ("+ ---- +", "- ++++ -", "- --+- -")),
    ((2, 3), ("-- +++", "++ ---", "-- ---")),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize(("sizes", "reached"), SEGMENTS)
def test_ranks_of_which_some_go_past_a_checkpoint_over_several_groups_train_alike(
    sizes: tuple[int, ...], reached: tuple[str, ...], use_reentrant: bool, ranks: int
) -> None:
    program = ["backward", "step", "backward", "accumulate", "backward", "step", "backward"]
    assert_trains_like_unsharded(
        partial(Recomputing, sizes, use_reentrant),
        program,
        world_size=ranks,
        shard=shard_all,
        loss=Loss(reached),
        timeout=60,
    )


class Rescued(nn.Module):
    """Adds what its parts give, each under a reentrant checkpoint, as often as is said."""

    def __init__(self, *parts: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            y = x
            for _ in range(self.times):
                y = torch.tanh(checkpoint(part, y, use_reentrant=True))
            x = x + y
        return x


class Containers(nn.Module):
    """Two containers of one group around groups of their own; the second has a weight besides."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(linear()), Around(linear())])

    def forward(self, x: torch.Tensor, reached: str) -> torch.Tensor:
        for part, goes in zip(self.parts, reached, strict=True):
            output = part(x)
            x = x + (output if goes == "+" else output.detach())
        return x


def shard_containers(model: Any, **options: Any) -> nn.Module:
    for inner in (model.parts[0][0], model.parts[1].parts[0]):
        fully_shard(inner, **options)
    fully_shard(list(model.parts), **options)
    return fully_shard(model, **options)


def shard_first_two(model: Any, **options: Any) -> nn.Module:
    """Make what is under a checkpoint, and what is not, one group."""
    fully_shard([model.parts[0].parts[0], model.parts[1]], **options)
    return fully_shard(model, **options)


def shard_parts(model: Any, **options: Any) -> nn.Module:
    """Make each part a group, and all that lies in it, containers without parameters too."""
    for part in model.parts:
        for inner in part.parts if isinstance(part, Rescued) else ():
            for innermost in inner.children():
                fully_shard(innermost, **options)
            fully_shard(inner, **options)
        fully_shard(part, **options)
    return fully_shard(model, **options)


def recomputed_beside_plain() -> nn.Module:
    return Model(Rescued(linear()), linear())


def recomputed_frozen() -> nn.Module:
    return Model(Rescued(nn.Sequential(linear(trains=False))), linear())


def recomputed_twice() -> nn.Module:
    return Model(Rescued(linear(), linear(), times=2), linear())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
@pytest.mark.parametrize(
    ("build", "shard"),
    [
        (Containers, shard_containers),
        (recomputed_beside_plain, shard_first_two),
        (recomputed_frozen, shard_parts),
        (recomputed_twice, shard_parts),
    ],
)
def test_ranks_that_go_past_parts_of_groups_train_alike(
    build: Build, shard: Any, program: list[str], ranks: int
) -> None:
    """Of a group of several modules, or one that a reentrant checkpoint computes again."""
    assert_trains_like_unsharded(
        build,
        program,
        world_size=ranks,
        shard=shard,
        loss=Loss(("+-", "++", "-+")),
        timeout=30,
    )


class FrozenBetween(nn.Module):
    """Has a frozen part whose input needs a gradient, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.frozen = linear(trains=False)
        self.then = linear()
        self.last = linear()

    def forward(self, x: torch.Tensor, reached: str) -> torch.Tensor:
        x = self.first(x)
        frozen = self.frozen(x if reached[0] == "+" else x.detach())
        output = self.then(frozen)
        return self.last(x + (output if reached[1] == "+" else output.detach()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_which_some_need_no_gradient_of_a_frozen_part_train_alike(ranks: int) -> None:
    assert_trains_like_unsharded(
        FrozenBetween,
        ["backward", "step", "backward", "accumulate", "backward", "step"],
        world_size=ranks,
        shard=shard_all,
        loss=Loss(("++", "-+", "+-", "--")),
        timeout=60,
    )


def mixed_order_of_two_forwards() -> list[float]:
    """Sum the losses of two forwards; one rank's first loss reaches less than the other's."""
    torch.manual_seed(0)
    alone = Towers("")
    model = shard_all(copy.deepcopy(alone))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    uses = [("- - - -", "ab a b -"), ("a - - ab", "- b - -"), ("ab ab - -", "0 - - -")]

    def loss(m: nn.Module, rank: int) -> torch.Tensor:
        data = torch.Generator().manual_seed(rank)
        first, second = torch.randn(2, 2, WIDTH, generator=data)
        used = uses[rank % len(uses)]
        return m(first, used[0], "pqrs").sum() + m(second, used[1], "sqp").square().sum()

    for _ in range(3):
        loss(model, rank).backward()
    for other in range(ranks):
        (3 * loss(alone, other) / ranks).backward()
    return [
        (torch.zeros(()) if wanted.grad is None else got.grad.full_tensor() - wanted.grad)
        .abs()
        .max()
        .item()
        for got, wanted in zip(model.parameters(), alone.parameters(), strict=True)
        if (got.grad is None) == (wanted.grad is None) or pytest.fail("None on one side")
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_of_losses_of_several_forwards(num_ranks: int) -> None:
    for errors in run_ranks(mixed_order_of_two_forwards, num_ranks, timeout=60):
        assert len(errors) == 10 and max(errors) < 1e-4
