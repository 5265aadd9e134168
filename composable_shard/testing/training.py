"""Asserting that a model trains sharded as it trains whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from composable_shard.api import fully_shard
from composable_shard.policy import MixedPrecisionPolicy
from composable_shard.testing.expressions import call_expression
from composable_shard.testing.oracle import Build, MakeOptimizer
from composable_shard.testing.programs import Step, check_program
from composable_shard.testing.rank_errors import RankError
from composable_shard.testing.ranks import run_ranks
from composable_shard.testing.rehearsal import Loss, Plan, Rehearsal
from composable_shard.testing.trees import TreeLoss, TreeSpec, shard_tree

__all__ = ["assert_trains_like_unsharded", "shard_children"]

MAX_DIFFERENCES = 6
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def assert_trains_like_unsharded(
    build: Build,
    program: Sequence[Step],
    *,
    world_size: int | None = None,
    mesh: tuple[int, ...] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    shard: Any = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = SGD,
    tolerance: float | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> None:
    """Assert that a sharded model follows a training program as an unsharded one does.

    Every rank trains its part of the sharded model on batches of its own, and beside it one whole
    model for each rank, whose gradients it averages: the oracle, which trains on the global batch
    and communicates nothing. After every step of the program losses, gradients, parameters and
    buffers are compared: bit by bit where sums are exact (up to two ranks, SGD, and no
    half-precision parameters or float16 reduction), otherwise by a few roundings.

    Args:
        build: Returns a new model each time; its values come from torch's random state, which is
            set before. Like `shard`, `loss` and `optimizer`, a function that rank processes can
            import (module-level, a partial of one, a `TreeSpec`).
        program: The steps; see `composable_shard.testing.programs.Step` for what each does.
        world_size: How many ranks; 2, or what `mesh` has.
        mesh: Extents of the mesh, `(shard,)` or `(replicate, shard)`; by default there is one
            axis of all ranks, made by `fully_shard`.
        policy: The mixed precision policy of all groups.
        shard: `shard(model, **options)` applies `fully_shard` to the model and what it likes
            within, with these options; by default `shard_children`, for a tree `shard_tree`.
        loss: `loss(model, step, rank)` draws a batch, runs the model and returns a scalar. The
            random state is set for each step and rank, so `torch.randn` draws what it should.
            By default, for a tree, `TreeLoss()`.
        optimizer: Makes an optimizer from parameters; by default SGD with momentum. One that
            divides by the gradient's size (Adam) turns the rounding of gradients near zero into
            steps of full length, so expect differences from three ranks on.
        tolerance: How much may differ, relative to the largest element, instead of the above.
        timeout: Seconds after which the ranks are killed.
        options: Further arguments of every `fully_shard`, such as `reshard_after_forward`.

    Raises:
        AssertionError: They do not train alike, or the sharded one raised or hung. The text names
            the step, the rank and what differs, and holds the call as an expression to paste.
        ValueError: The program has an unknown step, `mesh` does not have `world_size` ranks, or
            there is no `loss`.
        TypeError: Something cannot be sent to the ranks.

    Example:
        >>> from composable_shard.testing import ParamSpec, TreeSpec
        >>> model = TreeSpec((ParamSpec((3, 2)),), (TreeSpec((ParamSpec((5,)),)),))
        >>> assert_trains_like_unsharded(model, ["backward", "step", "accumulate", "backward"])
    """
    steps = check_program(program)
    num_ranks = _num_ranks(world_size, mesh)
    is_tree = isinstance(build, TreeSpec)
    if loss is None and not is_tree:
        raise ValueError("Expected a loss, loss(model, step, rank), for a model that is no tree")
    plan = Plan(
        build,
        shard or (shard_tree if is_tree else shard_children),
        loss or TreeLoss(),
        optimizer,
        mesh,
        policy or MixedPrecisionPolicy(),
        tolerance,
        options,
    )
    failure = _rehearse(plan, steps, num_ranks, timeout)
    if failure is None:
        return
    given: dict[str, Any] = {
        "world_size": None if mesh else num_ranks,
        "mesh": mesh,
        "policy": policy,
        "shard": shard,
        "loss": loss,
        "optimizer": None if optimizer is SGD else optimizer,
        "tolerance": tolerance,
        **options,
    }
    shown = {key: value for key, value in given.items() if value is not None}
    call = call_expression("assert_trains_like_unsharded", (build, list(steps)), shown)
    raise AssertionError(f"{failure}\n\n{call}")


def shard_children(model: nn.Module, **options: Any) -> nn.Module:
    """Apply `fully_shard` to each child of a model, to each member of a list of them, and to it.

    Args:
        model: The model.
        options: Arguments of every `fully_shard`.

    Returns:
        The model.

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = shard_children(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        ...     [type(part).__name__ for part in model.modules()]
        ['FSDPSequential', 'FSDPLinear', 'ReLU']
    """
    for child in model.children():
        members = list(child) if isinstance(child, nn.ModuleList) else [child]
        for member in members:
            if any(True for _ in member.parameters()) and not isinstance(member, nn.ModuleDict):
                fully_shard(member, **options)
    return fully_shard(model, **options)


def _num_ranks(world_size: int | None, mesh: tuple[int, ...] | None) -> int:
    if mesh is None:
        return 2 if world_size is None else world_size
    if world_size not in (None, math.prod(mesh)):
        raise ValueError(
            f"Expected a mesh of {world_size} ranks, got {mesh}, which has {math.prod(mesh)}"
        )
    return math.prod(mesh)


@dataclass(frozen=True)
class _Difference:
    """What differs on a rank after a step; step -1 is the start."""

    step: int
    rank: int
    text: str


class _StepFailure(RuntimeError):
    """Something was raised in a step."""


def _follow(plan: Plan, steps: tuple[Step, ...]) -> list[_Difference]:
    """Follow a program on this rank; a rank goes on where it differs, as the others do."""
    rehearsal = Rehearsal(plan)
    rank = rehearsal.rank
    found = [_Difference(-1, rank, text) for text in rehearsal.differences_at_start()]
    for place, step in enumerate(steps):
        try:
            found += [_Difference(place, rank, text) for text in rehearsal.do(step)]
        except Exception as error:
            what = f"{_place(place, steps)}: raised {type(error).__name__}: {error}"
            raise _StepFailure(what) from error
    return found[: 10 * MAX_DIFFERENCES]


def _rehearse(plan: Plan, steps: tuple[Step, ...], num_ranks: int, timeout: float) -> str | None:
    """Let ranks follow the program; tell what went wrong first."""
    try:
        found = [
            one
            for own in run_ranks(_follow, num_ranks, plan, steps, timeout=timeout)
            for one in own
        ]
    except RankError as error:
        return _told(error)
    if not found:
        return None
    first = min(one.step for one in found)
    same = [one for one in found if one.step == first]
    lines = [f"rank {one.rank}: {one.text}" for one in same[:MAX_DIFFERENCES]]
    if len(same) > MAX_DIFFERENCES:
        lines.append(f"and {len(same) - MAX_DIFFERENCES} more differences")
    where = _place(first, steps) if first >= 0 else "before the first step"
    head = f"Expected to train like the unsharded model, got a difference at {where}:"
    return "\n".join([head, *lines])


def _told(error: RankError) -> str:
    lines = ["Expected to train like the unsharded model, got an error:"]
    own = [failure for failure in error.failures if failure.type_name == _StepFailure.__name__]
    lines += [f"rank {failure.rank}: {failure.message}" for failure in own]
    return "\n".join([*lines, "", str(error)])


def _place(place: int, steps: tuple[Step, ...]) -> str:
    return f"step {place + 1} of {len(steps)}, {steps[place]!r}"
