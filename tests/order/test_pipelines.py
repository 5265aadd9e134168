"""The pipeline schedules of torch drive sharded stages; the oracle is the whole model."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Block, full
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch_versions import needs_newer_torch

from composable_shard import MixedPrecisionPolicy, ShardError, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

WIDTH = 6
NUM_RANKS_OF_PIPELINE = 2
NUM_MICROBATCHES = 4
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved 1f1b": ScheduleInterleaved1F1B,
    "looped bfs": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dual pipe v": ScheduleDualPipeV,
}
V_SHAPED = ("zbv", "dual pipe v")


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def stages_of(schedule: str, rank: int) -> list[int]:
    if schedule in SINGLE:
        return [rank]
    last = 2 * NUM_RANKS_OF_PIPELINE - 1
    return [rank, last - rank] if schedule in V_SHAPED else [rank, rank + NUM_RANKS_OF_PIPELINE]


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    rows = 2 * NUM_MICROBATCHES
    return tuple(torch.randn(rows, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def expect(model: nn.Sequential, step: int, num_replicas: int) -> list[list[float]]:
    """Leave on ``model`` the mean gradients over replicas and microbatches; return the losses."""
    losses = []
    totals: dict[str, torch.Tensor] = {}
    for replica in range(num_replicas):
        model.zero_grad()
        of_replica = []
        for x, target in zip(
            *(t.chunk(NUM_MICROBATCHES) for t in batch(step, replica)), strict=True
        ):
            loss = loss_of(model(x), target)
            loss.backward()
            of_replica.append(loss.item())
        losses.append(of_replica)
        for name, param in model.named_parameters():
            assert param.grad is not None
            totals[name] = totals[name] + param.grad if name in totals else param.grad
    for name, param in model.named_parameters():
        param.grad = totals[name] / num_replicas / NUM_MICROBATCHES
    return losses


def shard(stage: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    inner = {**options, "mp_policy": replace(policy, output_dtype=None)}
    for block in stage.blocks:
        fully_shard(block, mesh=mesh, **inner)
    return fully_shard(stage, mesh=mesh, **options)


def drive(schedule: str, options: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Train three steps; return how often each stage gathered, reduced and accumulated."""
    mesh = init_device_mesh(
        "cpu",
        (NUM_RANKS_OF_PIPELINE, dist.get_world_size() // NUM_RANKS_OF_PIPELINE),
        mesh_dim_names=("pp", "dp"),
    )
    pp, dp = mesh["pp"], mesh["dp"]
    num_stages = NUM_RANKS_OF_PIPELINE * (1 if schedule in SINGLE else 2)
    torch.manual_seed(5)
    reference = nn.Sequential(*(Stage() for _ in range(num_stages)))
    own = stages_of(schedule, pp.get_local_rank())
    parts = [shard(copy.deepcopy(reference[index]), dp, **options) for index in own]
    stages = [
        PipelineStage(part, index, num_stages, torch.device("cpu"), group=pp.get_group())
        for part, index in zip(parts, own, strict=True)
    ]
    make = {**SINGLE, **MULTI}[schedule]
    runner = make(stages[0] if schedule in SINGLE else stages, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizers = [
        torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1),
        torch.optim.SGD(reference.parameters(), lr=0.1),
    ]
    counts = []
    for step in range(3):
        expected = expect(reference, step, dp.size())
        x, target = batch(step, dp.get_local_rank())
        losses: list[torch.Tensor] = []
        with record_events(parts[0]) as recorded:
            runner.step(
                *([x] if 0 in own else []),
                target=target if num_stages - 1 in own else None,
                losses=losses if num_stages - 1 in own else None,
            )
        if losses:
            close([loss.detach() for loss in losses], expected[dp.get_local_rank()])
        for part, index in zip(parts, own, strict=True):
            pairs = zip(part.named_parameters(), reference[index].parameters(), strict=True)
            for (name, param), wanted in pairs:
                assert param.grad.placements == param.placements, name
                close(full(param.grad), wanted.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        happened = [event for event, _ in recorded]
        counts.append(
            tuple(happened.count(e) for e in ("all_gather", "reduce_scatter", "accumulate"))
        )
    return counts


def close(actual: Any, wanted: Any, name: str | None = None) -> None:
    wanted = torch.as_tensor(wanted)
    actual = torch.stack(actual) if isinstance(actual, list) else actual
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6, msg=name)


def steps_on_ranks(schedule: str, reshard: bool | None) -> list[tuple[int, int, int]]:
    """Return what the first stage of a rank did in a step after the first, which infers shapes."""
    seen = run_ranks(partial(drive, schedule, {"reshard_after_forward": reshard}), 4)
    later = {counts for of_rank in seen for counts in of_rank[1:]}
    assert all(num_reductions == 3 for _, num_reductions, _ in later), later
    return sorted(later)


ROOT_GATHERS = {"gpipe": (4,), "1f1b": (1, 2)}
"""How often a root that is kept for backward is gathered: by each forward that follows another."""


@pytest.mark.brief(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("schedule", [*SINGLE, "interleaved 1f1b", "looped bfs"])
def test_schedules_with_whole_backwards(schedule: str, reshard: bool | None) -> None:
    """One reduction of each of three groups for all microbatches, which accumulate one by one."""
    found = steps_on_ranks(schedule, reshard)
    rest = (3, 3 * NUM_MICROBATCHES)
    if reshard is False:
        assert found == [(3, *rest)]
    elif schedule in SINGLE:
        roots = ROOT_GATHERS[schedule] if reshard is None else (5,)
        assert found == [(10 + num_gathers, *rest) for num_gathers in roots]


needs_self_sends = needs_newer_torch("a V-shaped schedule sends to its own rank by gloo")


@pytest.mark.brief(2)
@pytest.mark.parametrize(
    "schedule",
    [
        "zero bubble",
        pytest.param("zbv", marks=needs_self_sends),
        pytest.param("dual pipe v", marks=needs_self_sends),
    ],
)
def test_schedules_that_split_backward(schedule: str) -> None:
    """The gradients of inputs and of weights come from two calls of ``torch.autograd.grad``."""
    assert {num_gathers for num_gathers, *_ in steps_on_ranks(schedule, False)} == {3}


# Backwards in halves need parameters that stay --------------------------------------------------

REFUSAL = (
    "Expected the unsharded parameters of the root group to be registered in a backward of inputs "
    "alone, got the sharded ones, which lose their gradients; if a pipeline schedule splits "
    "backward, call set_reshard_after_forward(False) on its stages"
)


def mixed(order: str) -> str | None:
    """Differentiate some microbatches as a whole and others in halves, and ask for the reduction.

    ``F`` runs forward of the next microbatch; ``B`` the oldest's backward as a whole, ``I`` that of
    its inputs alone, after which its weights get ones.
    """
    stage = shard(Stage(), init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    for action in order:
        if action == "F":
            x = torch.randn(2, WIDTH, requires_grad=True)
            waiting.append((x, stage(x)))
            continue
        x, output = waiting.pop(0)
        stage.set_is_last_backward(False)
        stage.set_reshard_after_backward(False)
        stage.set_requires_gradient_sync(False)
        if action == "B":
            output.sum().backward()
        else:
            weights = list(stage.parameters())
            try:
                torch.autograd.grad(output.sum(), [x], retain_graph=True)
            except ShardError as error:
                return str(error)
            for param in weights:
                param.grad = torch.ones_like(param)
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(True)
    stage.set_requires_gradient_sync(True)
    torch_fully_shard.state(stage)._root_post_backward_final_callback()
    return None


@pytest.mark.parametrize(
    ("order", "is_exact"),
    [
        *[("FB", True), ("FFBB", True), ("FI", False)],
        # some microbatches have gradients of weights, others none
        *[("FBFI", False), ("FFIB", False), ("FIFB", False), ("FFII", False)],
        # the parameters stay from a backward to the next, so they are there to be asked for
        *[("FFBI", True), ("FFFBIB", True), ("FFBIFI", False)],
    ],
)
def test_no_microbatch_is_left_out_silently(order: str, is_exact: bool) -> None:
    """Some backward was split while parameters were sharded: an error, on all ranks."""
    assert run_ranks(mixed, 2, order) == [None if is_exact else REFUSAL] * 2
