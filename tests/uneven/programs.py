"""Generated programs in which ranks do not do the same, and what one process makes of all of it."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    CPUOffloadPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    sit_out,
    weigh,
)
from composable_shard.errors import ShardError

WIDTH = 5
RATE = 0.1  # of learning


@dataclass(frozen=True)
class TowerSpec:
    """A tower: its blocks, what of it is a group, and how it runs.

    With several calls in a forward, sitting out is decided for each of them.
    """

    num_blocks: int
    is_group: bool
    has_groups: bool  # of its blocks
    has_inner_groups: bool  # of a layer of each block
    checkpoints: str  # "", "reentrant" or "non-reentrant"
    is_frozen: bool
    num_calls: int


SYNCS = ("each", "last", "by hand", "open until the last", "not over replicas until the last")
FAILURES = ("", "", "", "forward", "before backward", "backward")
CLEARS = ("none", "none", "zeros", "not")


@dataclass(frozen=True)
class Turn:
    """What the ranks do with one microbatch, of each rank."""

    runs: tuple[tuple[bool, ...] | None, ...]  # calls of towers; None without a batch
    adds: tuple[bool, ...]  # the zeros of what it sits out to its loss
    weights: tuple[float, ...] = ()  # of losses, where a step is weighed


@dataclass(frozen=True)
class StepSpec:
    """An iteration: its microbatches, and what is set.

    It fails where the first microbatch raises on all ranks before all of them are done. Gradients
    are cleared after it, or late: before the next backward, and after its forward. Where it weighs,
    what was there is cleared.
    """

    turns: tuple[Turn, ...]
    trains: bool = True
    sync: str = "each"
    fails: str = ""
    clears: str = "none"
    clears_late: bool = False
    clips: bool = False
    weighs: bool = False


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
    dtype: torch.dtype = torch.float64


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * self.scale


class Tower(nn.Module):
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


class Failure(Exception):
    """Raised by a program."""


class Whole:
    """The same unsharded, on the batches of all ranks.

    Its gradients are sums until a step is over.
    """

    def __init__(self, model: Towers, program: Program) -> None:
        self.model = model
        self._program = program
        self.forget()

    def forget(self) -> None:
        self.weight, self.loss = 0.0, 0.0

    def clear(self, how: str) -> None:
        if how == "not":
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad *= self._program.num_ranks
            return
        self.model.zero_grad(set_to_none=how == "none")
        self.forget()

    @torch.no_grad()
    def step(self) -> None:
        """Do what the optimizer of the sharded model does.

        An optimizer of plain parameters would have the library look for the modules that hold them.
        """
        for param in self.model.parameters():
            if param.grad is not None:
                param.add_(param.grad, alpha=-RATE)

    def take_turn(self, turn: Turn, number: int, place: int, weighs: bool) -> None:
        for rank in range(self._program.num_ranks):
            if turn.runs[rank] is not None:
                batch = batch_of(self._program, number, place, rank)
                loss = loss_of(self.model, self._program, batch, turn.runs[rank], nothing)
                weight = turn.weights[rank] if weighs else 1.0
                (loss * weight).backward()
                self.loss += loss.item() * weight
                self.weight += weight

    def divide(self, weighs: bool) -> None:
        divisor = self.weight if weighs else float(self._program.num_ranks)
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad /= divisor


def check(program: Program) -> None:
    """Train on this rank, and the same unsharded with the batches of all; compare."""
    torch.manual_seed(0)
    whole = Whole(Towers(program).to(program.dtype), program)
    model: Any = shard(copy.deepcopy(whole.model), program)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    to_clear: list[str] = []

    def clear() -> None:
        for how in to_clear:
            if how != "not":
                optimizer.zero_grad(set_to_none=how == "none")
            whole.clear(how)
        to_clear.clear()

    for number, step in enumerate(program.steps):
        fails = step.fails if step.trains else ""
        if fails:
            clear()
            fail(model, program, step, number)
            if fails == "backward":  # of which some groups have been reduced
                to_clear.append("none")
                clear()
        weighs = step.weighs and step.trains
        if weighs:
            to_clear.append("none")
            clear()
        is_empty = weighs and not any(any(turn.weights) for turn in step.turns)
        expected = pytest.raises(ShardError, match="without tokens there is no mean")
        with (
            expected if is_empty else contextlib.nullcontext(),
            weigh(model) if weighs else contextlib.nullcontext() as weighing,
        ):
            for place, turn in enumerate(step.turns):
                synchronize(model, step.sync, is_last=place == len(step.turns) - 1)
                with torch.set_grad_enabled(step.trains):
                    loss = forward(model, program, turn, number, place)
                if not step.trains:
                    continue
                if weighing is not None:
                    loss = weighing.add(turn.weights[dist.get_rank()], loss)
                clear()
                loss.backward()
                whole.take_turn(turn, number, place, weighs)
            if step.trains and step.sync == "by hand":
                model.synchronize_gradients()
        if is_empty:
            to_clear.append("none")
            clear()
        if is_empty or not step.trains:
            continue
        if weighing is not None:
            expect_weighed(weighing, whole)
        whole.divide(weighs)
        compare_gradients(whole.model, model, program, f"after step {number}")
        if step.clips:
            norms = [
                clip_grad_norm_(model.parameters(), 0.5),
                nn.utils.clip_grad_norm_(whole.model.parameters(), 0.5),
            ]
            close(*norms, program, f"the norm after step {number}")
        optimizer.step()
        whole.step()
        compare(whole.model, model, program, f"after step {number}")
        to_clear.append(step.clears)
        if not step.clears_late:
            clear()


def synchronize(model: Any, sync: str, *, is_last: bool) -> None:
    model.set_requires_gradient_sync(
        sync not in ("last", "by hand") or (sync, is_last) == ("last", True)
    )
    model.set_is_last_backward(sync != "open until the last" or is_last)
    model.set_requires_all_reduce(sync != "not over replicas until the last" or is_last)


def expect_weighed(weighing: Any, whole: Whole) -> None:
    torch.testing.assert_close(weighing.total, whole.weight, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(weighing.loss, whole.loss / whole.weight, rtol=1e-4, atol=0.0)


def fail(model: Any, program: Program, step: StepSpec, number: int) -> None:
    """Begin a step that raises on all ranks, and runs all on them: they raise at one place."""
    synchronize(model, step.sync, is_last=True)
    handle = None
    if step.fails == "forward":
        handle = model.trunk.register_forward_hook(raise_failure)
    elif step.fails == "backward":
        handle = model.trunk.register_forward_hook(fail_in_backward)
    try:
        turn = replace(step.turns[0], runs=((True,) * sum(model.num_calls),) * program.num_ranks)
        loss = forward(model, program, turn, number, 0)
        if step.fails == "backward":
            loss.backward()
        raise Failure
    except Failure:
        pass
    finally:
        if handle is not None:
            handle.remove()
    if step.fails == "before backward":
        model.reset_iter_state()


def fail_in_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
    output.register_hook(raise_failure)


def raise_failure(*_: Any) -> None:
    raise Failure


def forward(model: Any, program: Program, turn: Turn, number: int, place: int) -> torch.Tensor:
    rank = dist.get_rank()
    runs, adds = turn.runs[rank], turn.adds[rank]

    def leave_out(tower: nn.Module) -> torch.Tensor | float:
        zero = sit_out(tower)
        assert zero.item() == 0
        return zero if adds else 0.0

    if runs is None and program.is_called_as_whole:
        return sit_out(model)
    if runs is None:
        return sum((sit_out(tower) for tower in called(model)), sit_out(model.trunk))
    return loss_of(model, program, batch_of(program, number, place, rank), runs, leave_out)


def batch_of(program: Program, step: int, turn: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * turn + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=program.dtype)


def nothing(_: nn.Module) -> float:
    return 0.0


def loss_of(
    model: Any, program: Program, x: torch.Tensor, runs: tuple[bool, ...], leave_out: Any
) -> torch.Tensor:
    whole = program.is_called_as_whole
    output = model(x, runs, leave_out) if whole else model.branches(model.trunk(x), runs, leave_out)
    return output.square().mean()


def called(model: Towers) -> list[nn.Module]:
    pairs = zip(model.towers, model.num_calls, strict=True)
    return [tower for tower, num_calls in pairs for _ in range(num_calls)]


def compare(whole: Towers, model: Any, program: Program, when: str) -> None:
    for (name, expected), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        close(got.to_local(), shard_like(expected, got), program, f"{name} {when}")


def compare_gradients(whole: Towers, model: Any, program: Program, when: str) -> None:
    for (name, expected), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None or got.grad is None:
            assert (expected.grad is None) == (got.grad is None), f"{name} {when}"
            continue
        said = f"the gradient of {name} {when}"
        close(got.grad.to_local(), shard_like(expected.grad, got.grad), program, said)


def shard_like(full: torch.Tensor, like: Any) -> torch.Tensor:
    mesh, placements = like.device_mesh, like.placements
    shard: Any = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
    return shard.to_local()


def close(got: torch.Tensor, expected: torch.Tensor, program: Program, what: str) -> None:
    relative = 1e-9 if program.dtype == torch.float64 else 1e-4
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        got.detach(),
        expected.detach(),
        rtol=relative,
        atol=relative * max(largest, 1e-3),
        msg=lambda text: f"{what}: {text}",
    )


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

weights = st.one_of(
    st.sampled_from([0.0, 0.0, 1.0, 1e15, 1e-6]),
    st.integers(1, 5000).map(float),
    st.floats(0.01, 100),
)


def turn_of(
    runs: tuple[tuple[bool, ...] | None, ...],
    adds: tuple[bool, ...],
    weights: tuple[float, ...],
) -> Turn:
    """Return a turn in which a rank without a batch weighs nothing."""
    pairs = zip(runs, weights, strict=True)
    return Turn(runs, adds, tuple(0.0 if run is None else weight for run, weight in pairs))


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
        turn_of,
        st.lists(st.one_of(st.none(), runs), **of_ranks).map(tuple),
        st.lists(st.booleans(), **of_ranks).map(tuple),
        st.lists(weights, **of_ranks).map(tuple),
    )
    steps = st.builds(
        StepSpec,
        turns=st.lists(turns, min_size=1, max_size=3).map(tuple),
        trains=st.sampled_from([True, True, True, False]),
        sync=st.sampled_from(SYNCS),
        fails=st.sampled_from(FAILURES),
        clears=st.sampled_from(CLEARS),
        clears_late=st.booleans(),
        clips=st.sampled_from([False, False, True]),
        weighs=st.booleans(),
    )
    known = Turn(((True,) * num_calls,) * num_ranks, (True,) * num_ranks)
    is_plain = not any(one.checkpoints or one.num_calls > 1 for one in specs)
    is_plain = is_plain and (is_called_as_whole or not any(one.is_frozen for one in specs))
    first = [] if is_plain else [StepSpec((known,))]
    return Program(
        num_ranks,
        num_replicas,
        tuple(specs),
        (*first, *draw(st.lists(steps, min_size=1, max_size=3))),
        reshards=draw(st.sampled_from([None, True, False])),
        offloads=draw(st.booleans()),
        is_called_as_whole=is_called_as_whole,
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
    )
