"""Training programs, run by a sharded model and by its oracle."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard.api import fully_shard
from composable_shard.arguments import check_value, checked_number
from composable_shard.module import FSDPModule
from composable_shard.policy import MixedPrecisionPolicy
from composable_shard.testing import oracle, programs
from composable_shard.testing.oracle import Build, MakeOptimizer, Unsharded
from composable_shard.testing.programs import Step, TreeLoss, TreeSpec, shard_tree
from composable_shard.testing.ranks import RankError, run_ranks

# One rank that follows a program ------------------------------------------------------------------

Loss = Callable[[nn.Module, int, int], torch.Tensor]
Within = Callable[[], contextlib.AbstractContextManager[list[str] | None]]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Plan:
    """The arguments of a training; see `assert_trains_like_unsharded`."""

    build: Build
    shard: Callable[..., object] | None = None
    loss: Loss | None = None
    optimizer: MakeOptimizer = SGD
    mesh: tuple[int, ...] | None = None
    policy: MixedPrecisionPolicy | None = None
    tolerance: float | None = None
    within: Within = contextlib.nullcontext
    options: dict[str, Any] = field(default_factory=dict)


class _Planned(Exception):
    """The exception of `fail_forward` and `fail_backward`."""


class Rehearsal:
    """A sharded model and its oracle, which do the same steps one after another.

    Args:
        plan: The training.

    Attributes:
        model: The sharded model; a new one after a checkpoint.
        oracle: The oracle.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank, self.num_steps = plan, dist.get_rank(), 0
        policy = plan.policy or MixedPrecisionPolicy()
        self.oracle = Unsharded(plan.build, policy, plan.optimizer, plan.tolerance)
        self.model, self.optimizer = self._new_sharded(seed=0)
        # The sharded parameters, because after a forward the root shows its unsharded ones.
        self._sharded_params = dict[str, nn.Parameter](self.model.named_parameters())
        self.oracle.cast_at(
            name for name, module in self.model.named_modules() if isinstance(module, FSDPModule)
        )
        self._kept: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._found: list[str] = []

    def do(self, step: Step) -> list[str]:
        """Do a step with both models; return the differences after it."""
        getattr(self, f"_{step}")()
        found, self._found = [*self._found, *self.differences()], []
        if step == "step" and not self.oracle.is_exact:
            self._start_from_the_same()
        self.num_steps += 1
        return found

    def differences(self) -> list[str]:
        """Compare the gradients, parameters and buffers of both models."""
        return self.oracle.differences(self._sharded_params, self.model.named_buffers())

    # Forward and backward -------------------------------------------------------------------

    def _forward(self) -> None:
        self._kept.append(self._losses())

    def _backward(self) -> None:
        self._go_back(reduces=True)

    def _accumulate(self) -> None:
        with self.model.no_sync():
            self._go_back(reduces=False)

    def _go_back(self, reduces: bool) -> None:
        kept, self._kept = self._kept or [self._losses()], []
        sharded: Any = sum(loss for loss, _ in kept)
        unsharded: Any = map(sum, zip(*(losses for _, losses in kept), strict=True))
        for loss in (sharded, *unsharded):
            if loss.requires_grad:
                loss.backward()
        if sharded.requires_grad:
            self.oracle.take(reduces)

    def _losses(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sharded = self._loss(self.model, self.rank)
        unsharded = [self._loss(model, rank) for rank, model in enumerate(self.oracle.models)]
        self._found += self.oracle.differs("loss", sharded, unsharded[self.rank])
        return sharded, unsharded

    def _loss(self, model: nn.Module, rank: int) -> torch.Tensor:
        # The same batch and the same dropout for a rank and for its unsharded twin.
        torch.manual_seed(1000 * self.num_steps + rank)
        is_oracle = model is not self.model
        with self.oracle.lend_buffers(model) if is_oracle else contextlib.nullcontext():
            return (self.plan.loss or TreeLoss())(model, self.num_steps, rank)

    def _evaluate(self) -> None:
        for model, _ in self._everyone():
            model.eval()
        with torch.no_grad():
            self._losses()
        for model, _ in self._everyone():
            model.train()

    # Between backwards ----------------------------------------------------------------------

    def _sync(self) -> None:
        self.model.synchronize_gradients()
        self.oracle.reduce()

    def _zero_grad(self) -> None:
        if self.num_steps % 2:
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad()
        self.oracle.clear()

    def _step(self) -> None:
        self._kept = []
        if self.oracle.waits_somewhere:
            self._sync()
        self.optimizer.step()
        self.oracle.step()

    def _reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _checkpoint(self) -> None:
        self._kept = []
        states = oracle.written_and_read((self.model.state_dict(), self.optimizer.state_dict()))
        self.model, self.optimizer = self._new_sharded(seed=self.num_steps + 1)
        self._sharded_params = dict(self.model.named_parameters())
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        self.oracle.clear()

    # Failures -------------------------------------------------------------------------------

    def _fail_forward(self) -> None:
        self._kept = []
        for model, rank in self._everyone():
            with (
                contextlib.suppress(_Planned),
                self._failing_part(model).register_forward_pre_hook(_raise_planned),
                model.register_forward_hook(_raise_planned),
            ):
                self._loss(model, rank)

    def _fail_backward(self) -> None:
        """Fail in the backward of the first module that was called, or at once."""
        self._kept = []
        for model, rank in self._everyone():
            part = self._failing_part(model)
            with contextlib.suppress(_Planned), part.register_forward_hook(_fail_behind):
                loss = self._loss(model, rank)
                if loss.requires_grad:
                    if self.num_steps % 2:
                        loss.register_hook(_raise_planned)
                    loss.backward()
        self.optimizer.zero_grad()
        self.oracle.clear()

    def _failing_part(self, model: nn.Module) -> nn.Module:
        parts = list(model.modules())
        return parts[self.num_steps % len(parts)]

    def _everyone(self) -> list[tuple[nn.Module, int]]:
        """Return the sharded model and those of the oracle, each with the rank of its batches."""
        return [(self.model, self.rank), *((m, rank) for rank, m in enumerate(self.oracle.models))]

    # The sharded model ----------------------------------------------------------------------

    def _new_sharded(self, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        options = dict(self.plan.options, mp_policy=self.plan.policy)
        if self.plan.mesh is not None:
            options["mesh"] = _mesh(self.plan.mesh)
        model = oracle.new_model(self.plan.build, seed)
        shard: Any = shard_tree if isinstance(self.plan.build, TreeSpec) else shard_children
        (self.plan.shard or shard)(model, **options)
        if not isinstance(model, FSDPModule):
            raise ValueError(
                f"Expected shard() to apply fully_shard to the model, got a plain "
                f"{type(model).__name__}"
            )
        return model, self.plan.optimizer(model.parameters())

    def _start_from_the_same(self) -> None:
        """Give the oracle the sharded parameters, so that rounding errors do not add up."""
        self._reshard()
        with torch.no_grad():
            for name, param in self.oracle.master.named_parameters():
                sharded: Any = self._sharded_params[name]
                param.copy_(sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded)
        self.oracle.refresh()


@lru_cache(maxsize=32)
def _mesh(extents: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(extents) :]
    return init_device_mesh("cpu", extents, mesh_dim_names=names)


def _raise_planned(*_: object) -> None:
    raise _Planned


def _fail_behind(module: nn.Module, args: object, output: object) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(_raise_planned)


# The assertion ------------------------------------------------------------------------------------

MAX_DIFFERENCES = 6


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
    within: Within = contextlib.nullcontext,
    timeout: float = 60.0,
    **options: Any,
) -> None:
    """Assert that a sharded model follows a training program as an unsharded one does.

    Every rank trains its part of the sharded model on batches of its own, and beside it one whole
    model for each rank, with averaged gradients: the oracle, which trains on the global batch and
    communicates nothing. After every step of the program losses, gradients, parameters and
    buffers are compared: bit by bit where sums are exact (up to two ranks, SGD, and no
    half-precision parameters or float16 reduction), otherwise by a few roundings.

    Args:
        build: Returns a new model each time; its values come from torch's random state, which is
            set before. Like `shard`, `loss` and `optimizer`, a function that rank processes can
            import (module-level, a partial of one, a `TreeSpec`).
        program: The steps; see `composable_shard.testing.programs.Step` describes each.
        world_size: The number of ranks; by default 2, or that of `mesh`.
        mesh: Extents of the mesh, `(shard,)` or `(replicate, shard)`; by default there is one
            axis of all ranks, made by `fully_shard`.
        policy: The mixed precision policy of all groups.
        shard: `shard(model, **options)` applies `fully_shard` to the model and to modules
            within it, with these options; by default `shard_tree` for a tree, else
            `shard_children`.
        loss: `loss(model, step, rank)` draws a batch, runs the model and returns a scalar. The
            random state is set for each step and rank, so `torch.randn` draws the right batch.
            By default, for a tree, `TreeLoss()`.
        optimizer: Makes an optimizer from parameters; by default SGD with momentum. One that
            divides by the gradient's size (Adam) turns the rounding of gradients near zero into
            steps of full length, so expect differences from three ranks on.
        tolerance: The allowed difference, relative to the largest element, instead of the default.
        within: Makes a context in which each rank trains. If the context yields a list, each text
            in it at the end counts as a difference.
        timeout: Seconds after which the ranks are killed.
        options: Further arguments of every `fully_shard`, such as `reshard_after_forward`.

    Raises:
        AssertionError: They do not train alike, or the sharded one raised or hung. The text names
            the step, the rank and the differences, and holds the call as an expression to paste.
        ValueError: The program has an unknown step or none at all, `mesh` does not have
            `world_size` ranks or has more axes, `tolerance` is not finite, or there is no `loss`.
        TypeError: An argument has the wrong type, or something cannot be sent to the ranks.

    Example:
        >>> from composable_shard.testing import ParamSpec, TreeSpec
        >>> model = TreeSpec((ParamSpec((3, 2)),), (TreeSpec((ParamSpec((5,)),)),))
        >>> assert_trains_like_unsharded(model, ["backward", "step", "accumulate", "backward"])
    """
    steps = programs.check_program(program)
    if tolerance is not None:
        fits = 0 <= checked_number("tolerance", tolerance) < math.inf
        check_value("tolerance", tolerance, fits, "to be a finite number of at least 0")
    num_ranks = _num_ranks(world_size, mesh)
    if loss is None and not isinstance(build, TreeSpec):
        raise ValueError("Expected a loss, loss(model, step, rank), for a model that is no tree")
    plan = Plan(build, shard, loss, optimizer, mesh, policy, tolerance, within, options)
    failure = _rehearse(plan, steps, num_ranks, timeout)
    if failure is not None:
        shown: dict[str, Any] = {} if mesh else {"world_size": num_ranks}
        shown |= programs.changed_fields(plan)
        del shown["build"], shown["options"]
        arguments = (build, list(steps)), {**shown, **options}
        call = programs.call_expression("assert_trains_like_unsharded", *arguments)
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
    fits = mesh is None or len(mesh) in (1, 2)
    check_value("mesh", mesh, fits, "to be (shard,) or (replicate, shard)")
    if mesh is None:
        return 2 if world_size is None else world_size
    num_ranks = math.prod(mesh)
    fits = world_size in (None, num_ranks)
    check_value("mesh", mesh, fits, f"to have {world_size} ranks, as world_size says")
    return num_ranks


class _StepFailure(RuntimeError):
    """An exception in a step."""


def _follow(plan: Plan, steps: tuple[Step, ...]) -> list[tuple[int, str]]:
    """Follow a program on this rank; a difference does not end it, as other ranks would wait.

    Returns:
        The differences, each with the index of its step.
    """
    with plan.within() as complaints:
        rehearsal, found = Rehearsal(plan), list[tuple[int, str]]()
        for place, step in enumerate(steps):
            try:
                found += [(place, text) for text in rehearsal.do(step)]
            except Exception as error:
                what = f"{_place(place, steps)}: raised {type(error).__name__}: {error}"
                raise _StepFailure(what) from error
    return [*found[: 10 * MAX_DIFFERENCES], *((len(steps) - 1, text) for text in complaints or ())]


def _rehearse(plan: Plan, steps: tuple[Step, ...], num_ranks: int, timeout: float) -> str | None:
    """Run the program on ranks; return the text of the first failure."""
    head = "Expected to train like the unsharded model, got"
    try:
        of_ranks = run_ranks(_follow, num_ranks, plan, steps, timeout=timeout)
    except RankError as error:
        failures = [f for f in error.failures if f.type_name == _StepFailure.__name__]
        lines = [f"rank {failure.rank}: {failure.message}" for failure in failures]
        return "\n".join([f"{head} an error:", *lines, "", str(error)])
    found = [(step, rank, text) for rank, own in enumerate(of_ranks) for step, text in own]
    if not found:
        return None
    first = min(step for step, _, _ in found)
    same = [f"rank {rank}: {text}" for step, rank, text in found if step == first]
    if len(same) > MAX_DIFFERENCES:
        same[MAX_DIFFERENCES:] = [f"and {len(same) - MAX_DIFFERENCES} more differences"]
    return "\n".join([f"{head} a difference at {_place(first, steps)}:", *same])


def _place(place: int, steps: tuple[Step, ...]) -> str:
    return f"step {place + 1} of {len(steps)}, {steps[place]!r}"
