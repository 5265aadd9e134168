"""Generated programs in which ranks do not do the same, and what one process makes of all of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_shard import CPUOffloadPolicy, OffloadPolicy, fully_shard, sit_out

WIDTH = 5


@dataclass(frozen=True)
class TowerSpec:
    """What a tower is.

    Attributes:
        num_blocks: How many blocks it has.
        is_group: Whether it is sharded itself.
        has_groups: Whether its blocks are.
        has_inner_groups: Whether a layer of each of its blocks is.
        checkpoints: Whether it runs in an activation checkpoint, and in which kind.
        is_frozen: Whether it is not trained.
        num_calls: How often it is called in a forward, with sitting out decided for each call.
    """

    num_blocks: int
    is_group: bool
    has_groups: bool
    has_inner_groups: bool
    checkpoints: str
    is_frozen: bool
    num_calls: int


@dataclass(frozen=True)
class Turn:
    """What the ranks do with one microbatch.

    Attributes:
        runs: For each rank the calls of towers that it computes; ``None`` if it has no batch.
        adds: For each rank whether it adds the zeros of what it sits out to its loss.
    """

    runs: tuple[tuple[bool, ...] | None, ...]
    adds: tuple[bool, ...]


@dataclass(frozen=True)
class StepSpec:
    """An iteration: its microbatches, and what is set.

    Attributes:
        turns: The microbatches.
        trains: Whether there is a backward.
        syncs_each: Whether gradients are reduced after each microbatch, or after the last.
    """

    turns: tuple[Turn, ...]
    trains: bool
    syncs_each: bool


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded, and what ranks do with it."""

    num_ranks: int
    num_replicas: int
    towers: tuple[TowerSpec, ...]
    steps: tuple[StepSpec, ...]
    reshards: bool | None
    offloads: bool
    is_called_as_whole: bool


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * self.scale


class Tower(nn.Module):
    """Blocks one after the other."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(spec.num_blocks))
        self.checkpoints = spec.checkpoints
        if spec.is_group:
            self.shift = nn.Parameter(torch.zeros(WIDTH))

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints and torch.is_grad_enabled():
            x = checkpoint(self._run, x, use_reentrant=self.checkpoints == "reentrant")
        else:
            x = self._run(x)
        return x + self.shift if hasattr(self, "shift") else x


class Towers(nn.Module):
    """A trunk and towers on it, of which a call leaves out what its rank has nothing for."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.trunk = Block()
        self.towers = nn.ModuleList(Tower(spec) for spec in program.towers)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.num_calls = [spec.num_calls for spec in program.towers]
        for tower, spec in zip(self.towers, program.towers, strict=True):
            tower.requires_grad_(not spec.is_frozen)

    def forward(self, x: torch.Tensor, runs: tuple[bool, ...], leave_out: Any) -> torch.Tensor:
        x = self.trunk(x)
        return self.branches(x, runs, leave_out) * self.gain

    def branches(self, x: torch.Tensor, runs: tuple[bool, ...], leave_out: Any) -> torch.Tensor:
        place = 0
        for tower, num_calls in zip(self.towers, self.num_calls, strict=True):
            for _ in range(num_calls):
                x = tower(x) if runs[place] else x + leave_out(tower)
                place += 1
        return x


def shard(model: Towers, program: Program) -> Towers:
    shape = (program.num_replicas, program.num_ranks // program.num_replicas)
    mesh = (
        init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        if program.num_replicas > 1
        else init_device_mesh("cpu", (program.num_ranks,))
    )
    policy = CPUOffloadPolicy(pin_memory=False) if program.offloads else OffloadPolicy()
    apply = partial(
        fully_shard, mesh=mesh, reshard_after_forward=program.reshards, offload_policy=policy
    )
    apply(model.trunk)
    for tower, spec in zip(model.towers, program.towers, strict=True):
        for block in tower.blocks:
            if spec.has_inner_groups:
                apply(block.inner)
            if spec.has_groups:
                apply(block)
        if spec.is_group:
            apply(tower)
    return apply(model)


# Runs ---------------------------------------------------------------------------------------------


def batch_of(step: int, turn: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * turn + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def nothing(_: nn.Module) -> float:
    return 0.0


def check(program: Program) -> None:
    """Train on this rank, and the same unsharded with the batches of all; compare."""
    torch.manual_seed(0)
    whole = Towers(program).double()
    model = shard(copy.deepcopy(whole), program)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (whole, model)]
    for number, step in enumerate(program.steps):
        for place, turn in enumerate(step.turns):
            is_last = place == len(step.turns) - 1
            model.set_requires_gradient_sync(step.syncs_each or is_last)
            take_turn(model, program, turn, number, place, trains=step.trains)
            for rank in range(program.num_ranks):
                if turn.runs[rank] is not None and step.trains:
                    batch = batch_of(number, place, rank)
                    loss = loss_of(whole, program, batch, turn.runs[rank], nothing)
                    (loss / program.num_ranks).backward()
        if step.trains:
            compare(whole, model, program, f"after step {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def take_turn(
    model: Any, program: Program, turn: Turn, number: int, place: int, *, trains: bool
) -> None:
    rank = dist.get_rank()
    runs, adds = turn.runs[rank], turn.adds[rank]

    def leave_out(tower: nn.Module) -> torch.Tensor | float:
        zero = sit_out(tower)
        assert zero.item() == 0
        return zero if adds else 0.0

    with torch.set_grad_enabled(trains):
        if runs is None and program.is_called_as_whole:
            loss = sit_out(model)
        elif runs is None:
            loss = sum((sit_out(tower) for tower in called(model)), sit_out(model.trunk))
        else:
            loss = loss_of(model, program, batch_of(number, place, rank), runs, leave_out)
    if trains:
        loss.backward()


def loss_of(
    model: Any, program: Program, x: torch.Tensor, runs: tuple[bool, ...], leave_out: Any
) -> torch.Tensor:
    whole = program.is_called_as_whole
    output = model(x, runs, leave_out) if whole else model.branches(model.trunk(x), runs, leave_out)
    return output.square().mean()


def called(model: Towers) -> list[nn.Module]:
    """Return the towers as often as a forward calls them."""
    pairs = zip(model.towers, model.num_calls, strict=True)
    return [tower for tower, num_calls in pairs for _ in range(num_calls)]


def compare(whole: Towers, model: Any, program: Program, when: str) -> None:
    for (name, expected), (_, got) in zip(
        whole.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-9, atol=1e-11, msg=name)
        if expected.grad is None or got.grad is None:
            assert (expected.grad is None) == (got.grad is None), f"{name} {when}"
            continue
        full = got.grad.full_tensor()
        said = f"the gradient of {name} {when}"
        torch.testing.assert_close(full, expected.grad, rtol=1e-9, atol=1e-11, msg=said)


# What is drawn ------------------------------------------------------------------------------------

towers = st.builds(
    TowerSpec,
    num_blocks=st.integers(1, 3),
    is_group=st.booleans(),
    has_groups=st.booleans(),
    has_inner_groups=st.booleans(),
    checkpoints=st.sampled_from(["", "", "reentrant", "non-reentrant"]),
    is_frozen=st.sampled_from([False, False, False, True]),
    num_calls=st.sampled_from([1, 1, 2]),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    num_ranks, num_replicas = draw(st.sampled_from([(2, 1), (3, 1), (4, 2)]))
    is_called_as_whole = draw(st.booleans())
    specs = draw(st.lists(towers, min_size=1, max_size=3))
    if not is_called_as_whole:  # then nothing gathers what the root owns
        specs = [spec if spec.has_groups else replace(spec, is_group=True) for spec in specs]
    # calls of what is not sharded itself are told apart by what it calls
    specs = [spec if spec.is_group else replace(spec, num_calls=1) for spec in specs]
    num_calls = sum(spec.num_calls for spec in specs)
    runs = st.lists(st.booleans(), min_size=num_calls, max_size=num_calls).map(tuple)
    of_ranks = {"min_size": num_ranks, "max_size": num_ranks}
    turns = st.builds(
        Turn,
        st.lists(st.one_of(st.none(), runs), **of_ranks).map(tuple),
        st.lists(st.booleans(), **of_ranks).map(tuple),
    )
    steps = st.builds(
        StepSpec,
        turns=st.lists(turns, min_size=1, max_size=2).map(tuple),
        trains=st.sampled_from([True, True, True, False]),
        syncs_each=st.booleans(),
    )
    known = Turn(((True,) * num_calls,) * num_ranks, (True,) * num_ranks)
    is_plain = not any(one.checkpoints or one.num_calls > 1 for one in specs)
    is_plain = is_plain and (is_called_as_whole or not any(one.is_frozen for one in specs))
    first = [] if is_plain else [StepSpec((known,), trains=True, syncs_each=True)]
    return Program(
        num_ranks,
        num_replicas,
        tuple(specs),
        (*first, *draw(st.lists(steps, min_size=1, max_size=3))),
        reshards=draw(st.sampled_from([None, True, False])),
        offloads=draw(st.booleans()),
        is_called_as_whole=is_called_as_whole,
    )
