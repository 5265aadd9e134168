"""The oracle: one process and one whole model, which computes on the batches of all ranks.

A gradient is the mean over all ranks by definition: a rank that has none counts as zeros, and a
parameter that no rank has used keeps ``None``.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .model import BATCH, WIDTH, Model, Plan, build, unpacked
from .program import Case, Op


class Invalid(ValueError):
    """The case asks for what no training can do, such as a backward from nothing."""


class Planned(Exception):
    """The exception that a step wants."""


def batch(case: Case, num_op: int, num_call: int, rank: int) -> torch.Tensor:
    seed = ((case.seed % 1000003) * 64 + num_op) * 256 + num_call * 16 + rank
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def make_optimizer(case: Case, params: Any) -> torch.optim.Optimizer:
    kind, _, how = case.optimizer.partition(".")
    more = {how: True} if how else {"foreach": False}
    if kind == "adamw":
        # A large eps: else a difference in the last bit of a gradient near zero is a whole step.
        return torch.optim.AdamW(params, lr=0.02, eps=1e-1, weight_decay=0.1, **more)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, **more)


Grads = dict[str, torch.Tensor]


class Follower:
    case: Case
    num_op: int
    heard: Any
    optimizer: torch.optim.Optimizer | None = None

    def params(self) -> dict[str, Any]:
        raise NotImplementedError

    def do(self, num_op: int, op: Op) -> None:
        self.num_op = num_op
        self.heard = None
        getattr(self, op.name)(op)

    def optimize(self, op: Op) -> None:
        self.optimizer = make_optimizer(self.case, self.params().values())

    def freeze(self, op: Op) -> None:
        for name, param in self.params().items():
            if owner(name) in op.names:
                param.requires_grad_(op.flag)

    @torch.no_grad()
    def edit(self, op: Op) -> None:
        params = list(self.params().values())
        if op.how == "foreach":
            torch._foreach_mul_(params, 0.9)
            return
        for param in params:
            param.clamp_(-0.4, 0.4) if op.how == "clamp" else param.mul_(0.9)


class Oracle(Follower):
    """Follows a program unsharded: by rank, gradients are ``waiting`` until they are ``reduced``.

    ``heard`` is what steps return: losses of each rank, norms.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ranks = range(case.num_ranks)
        self.model: Model = build(case.blocks, case.own, case.seed)
        if case.start == "double":
            self.model.float().double()
        self.waiting: list[Grads] = [{} for _ in self.ranks]
        self.reduced: Grads = {}
        self.is_synced = True
        self.teacher: Model | None = None
        self.saved: dict[str, torch.Tensor] | None = None
        self.heard: Any = None

    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def totals(self) -> Grads:
        """What gradients come to: reduced ones, and the mean of those that wait."""
        totals = dict(self.reduced)
        for name in self.params():
            own = [grads[name] for grads in self.waiting if name in grads]
            if own:
                mean = torch.stack(own).sum(0) / len(self.ranks)
                totals[name] = totals[name] + mean if name in totals else mean
        return totals

    # Forward and backward -------------------------------------------------------------------

    def train(self, op: Op) -> None:
        heard = []
        for rank in self.ranks:
            self._clear(self.model)
            losses = [
                self.model(batch(self.case, self.num_op, n, rank), call.for_rank(rank))
                for n, call in enumerate(op.calls)
            ]
            if "drop" in op.how:
                losses = losses[-1:]
            totals = losses if "each" in op.how else [torch.stack(losses).sum()]
            if not all(total.requires_grad for total in totals):
                raise Invalid("a loss that reaches nothing")
            before = {n for n, p in self.params().items() if p.grad is not None}
            for total in reversed(totals) if "reversed" in op.how else totals:
                if "retain" in op.how:
                    total.backward(retain_graph=True)
                total.backward()
            grads = self._take()
            if not grads.keys() - before and "nowhere" not in op.how:
                raise Invalid("a loss that reaches no parameter")
            for name, grad in grads.items():
                mine = self.waiting[rank]
                mine[name] = mine[name] + grad if name in mine else grad
            heard.append([loss.item() for loss in losses])
        if op.flag:
            self.sync(op)
        else:
            self.is_synced = False
        self.heard = heard

    def alone(self, op: Op) -> None:
        if not any(b.name in op.names and b.group != "parent" for b in self.case.blocks):
            raise Invalid("no such part")
        heard = []
        for rank in self.ranks:
            self._clear(self.model)
            loss = alone_loss(self.model, op, batch(self.case, self.num_op, 0, rank))
            if not loss.requires_grad:
                raise Invalid("a loss that reaches nothing")
            loss.backward()
            for name, grad in self._take().items():
                mine = self.waiting[rank]
                mine[name] = mine[name] + grad if name in mine else grad
            heard.append([loss.item()])
        self.sync(op)
        self.heard = heard

    def _take(self) -> Grads:
        grads = {}
        for name, param in self.params().items():
            if param.grad is not None:
                grads[name] = param.grad.clone()
                param.grad = None
        return grads

    def _clear(self, model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = None

    def sync(self, op: Op) -> None:
        self.reduced = self.totals()
        self.waiting = [{} for _ in self.ranks]
        self.is_synced = True

    def evaluate(self, op: Op) -> None:
        self.heard = self._evaluated(self.model, op)

    def _evaluated(self, model: Model, op: Op) -> list[list[float]]:
        with torch.inference_mode() if op.how == "inference" else torch.no_grad():
            return [
                [
                    model(batch(self.case, self.num_op, n, rank), call.for_rank(rank)).item()
                    for n, call in enumerate(op.calls)
                ]
                for rank in self.ranks
            ]

    def fail(self, op: Op) -> None:
        """An exception in forward or backward, at the first of the names."""
        for rank in self.ranks:
            self._clear(self.model)
            with failing(self.model, op):
                data = batch(self.case, self.num_op, 0, rank)
                loss = self.model(data, op.calls[0].for_rank(rank))
                if not loss.requires_grad:
                    raise Invalid("a loss that reaches nothing")
                loss.backward()
                raise Invalid("nothing failed")
            self._clear(self.model)
        self._drop()

    # Gradients and parameters ---------------------------------------------------------------

    def zero(self, op: Op) -> None:
        if op.flag:
            self._drop()
            return
        for grads in (self.reduced, *self.waiting):
            for name in grads:
                grads[name] = torch.zeros_like(grads[name])

    def _drop(self) -> None:
        self.waiting = [{} for _ in self.ranks]
        self.reduced = {}
        self.is_synced = True

    def grad_none(self, op: Op) -> None:
        for name in [n for n in self.params() if owner(n) in op.names]:
            for grads in (self.reduced, *self.waiting):
                grads.pop(name, None)

    def step(self, op: Op) -> None:
        if self.optimizer is None:
            return
        if not self.is_synced:
            self.sync(op)
        for name, param in self.params().items():
            param.grad = self.reduced.get(name)
        self.optimizer.step()
        self._clear(self.model)

    def clip(self, op: Op) -> None:
        if not self.is_synced:
            self.sync(op)
        grads = list(self.reduced.values())
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        factor = min(1.0, 0.1 / (norm + 1e-6))
        self.reduced = {name: grad * factor for name, grad in self.reduced.items()}
        self.heard = [[norm] for _ in self.ranks]

    @torch.no_grad()
    def save(self, op: Op) -> None:
        self.saved = {name: p.detach().clone() for name, p in self.params().items()}

    @torch.no_grad()
    def restore(self, op: Op) -> None:
        if self.saved is not None:
            for name, param in self.params().items():
                param.copy_(self.saved[name])

    @torch.no_grad()
    def teach(self, op: Op) -> None:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.model)
            self._clear(self.teacher)
        else:
            mine, theirs = list(self.teacher.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(mine, theirs, 0.5)

    def ask_teacher(self, op: Op) -> None:
        if self.teacher is not None:
            self.heard = self._evaluated(self.teacher, op)

    def nothing(self, op: Op) -> None:
        """What is about shards alone."""

    unshard = reshard = set_reshard = set_keep = prefetch = double = nothing


def owner(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else "root"


def alone_loss(model: Model, op: Op, data: torch.Tensor) -> torch.Tensor:
    part = model.parts[op.names[0]]
    return unpacked(part(data, data, Plan())).double().square().mean()


@contextlib.contextmanager
def failing(model: Any, op: Op) -> Iterator[None]:
    """Raise where a program wants it, and go on behind."""

    def fail(*_: Any) -> None:
        raise Planned

    def watch(module: Any, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(fail)

    name = op.names[0]
    part = next(m for n, m in model.named_modules() if n.split(".")[-1] == name or not name)
    is_forward = op.how == "forward"
    handle = (
        part.register_forward_pre_hook(fail) if is_forward else part.register_forward_hook(watch)
    )
    with contextlib.suppress(Planned):
        yield
    handle.remove()
