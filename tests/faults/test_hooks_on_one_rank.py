"""A hook of the user's fails on one rank when all have agreed: nobody waits for the time-out."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from near import Apart
from subclasses.lossless import Lossless, as_type
from torch import nn
from transport.own_collectives import Allocating

from composable_shard import AllGather, CommunicationError, ReduceScatter, fully_shard
from composable_shard.testing import run_ranks
from faults.breaking import BAD, WIDTH, mesh_over, step

pytestmark = pytest.mark.usefixtures("sharing")

BOTH_WAYS = pytest.mark.parametrize("apart", [False, True], ids=["reading", "sending"])
TIME_OUT = 100  # seconds of the process group
SOON = 40  # seconds of the call, in which all must have raised; a few as a rule
GATHERING, REDUCING = "gathering group '1'", "reducing the gradients of group '1'"


class Bomb:
    """Fails on one rank from the time on that it is set."""

    def __init__(self) -> None:
        self.is_set = False

    def tick(self, *_: object) -> None:
        if self.is_set and dist.get_rank() == BAD:
            raise ValueError("boom")


def hook_gathers(
    model: nn.Sequential, before: Callable[[], None], after: Callable[[], None]
) -> None:
    def pre(self: torch.Tensor, mesh: Any) -> Any:
        before()
        return (self,), None

    def post(self: torch.Tensor, gathered: Any, _: Any, dtype: Any, *, out: Any = None) -> Any:
        after()
        if out is None:
            return gathered[0].clone(), gathered
        return out.copy_(gathered[0])

    local = model[1].weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(pre, local)
    local.fsdp_post_all_gather = MethodType(post, local)


class _Custom(Allocating):
    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb


class Gather(_Custom, AllGather):
    def __call__(self, output: Any, own: Any, group: Any, async_op: bool = False) -> Any:
        self.bomb.tick()
        return dist.all_gather_into_tensor(output, own, group, async_op)


class Reduce(_Custom, ReduceScatter):
    def __call__(self, output: Any, own: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.bomb.tick()
        return dist.reduce_scatter_tensor(output, own, op, group, async_op)


PLACES: dict[str, Callable[[nn.Sequential, Bomb], object]] = {
    "pre-all-gather": lambda model, bomb: hook_gathers(model, bomb.tick, bool),
    "post-all-gather": lambda model, bomb: hook_gathers(model, bool, bomb.tick),
    "custom all-gather": lambda model, bomb: model[1].set_custom_all_gather(Gather(bomb)),
    "custom reduce-scatter": lambda model, bomb: model[1].set_custom_reduce_scatter(Reduce(bomb)),
    "all-reduce hook": lambda model, bomb: model[1].set_all_reduce_hook(bomb.tick),
    "post-accumulate hook": lambda model, bomb: model[1].weight.register_post_accumulate_grad_hook(
        bomb.tick
    ),
}


class BombBefore(Lossless):
    def fsdp_pre_reduce_scatter(self, grad: torch.Tensor, mesh: Any) -> Any:
        bombs[-1].tick()
        return super().fsdp_pre_reduce_scatter(grad, mesh)


class BombAfter(Lossless):
    def fsdp_post_reduce_scatter(self, received: Any, metadata: Any, out: torch.Tensor) -> None:
        bombs[-1].tick()
        super().fsdp_post_reduce_scatter(received, metadata, out)


bombs: list[Bomb] = []


def fails_in(place: str, kind: type[Lossless] | None) -> str:
    """Train a step, then others, in which a hook fails; return what is raised."""
    limit = datetime.timedelta(seconds=TIME_OUT)
    mesh = mesh_over(dist.new_group(timeout=limit))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    if kind is not None:
        as_type(model[1], kind)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    bombs.append(bomb := Bomb())
    if kind is None:
        PLACES[place](model, bomb)
    step(model)
    bomb.is_set = True
    try:
        for _ in range(3):
            step(model)
    except (ValueError, CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("Expected a failure, got none")


@pytest.mark.brief(3)
@BOTH_WAYS
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("place", "kind", "act"),
    [
        ("pre-all-gather", None, GATHERING),
        ("post-all-gather", None, GATHERING),
        ("custom all-gather", None, GATHERING),
        ("custom reduce-scatter", None, REDUCING),
        ("all-reduce hook", None, REDUCING),
        ("post-accumulate hook", None, REDUCING),
        ("pre-reduce-scatter", BombBefore, REDUCING),
        ("post-reduce-scatter", BombAfter, REDUCING),
    ],
)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(
    place: Any, kind: Any, act: str, ranks: int, apart: bool
) -> None:
    fn = Apart(fails_in) if apart else fails_in
    said = run_ranks(fn, ranks, place, kind, timeout=SOON)
    for rank, text in enumerate(said):
        if rank == BAD:
            assert text == "ValueError: boom"
        else:
            assert text.startswith(f"CommunicationError: Rank {rank} failed while ")
            assert f"rank {BAD} failed while {act}: ValueError: boom" in text
