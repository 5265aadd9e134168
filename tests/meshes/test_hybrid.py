"""Hybrid sharding: shards within the rows of a mesh, replicas between them."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from near import Apart
from nets import Gated, assert_parity, average_gradients, full, own_input
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from training.cases import reproducible
from training.trees import NUM_PARAMS, TREE, build, inputs_for

from composable_shard import FSDPModule, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks, shard_tree
from meshes.compare import Oracle, gradient_differences, value_differences

Step = Literal["sync", "no_all_reduce", "no_sync", "step", "zero_grad"]
BACKWARDS = ("sync", "no_all_reduce", "no_sync")


@dataclass(frozen=True)
class Program:
    """What to do, which parameters each rank uses in each step, and the extents of the mesh."""

    steps: tuple[Step, ...]
    used: tuple[tuple[tuple[bool, ...], ...], ...]
    extents: tuple[int, int] = (2, 2)
    reshard_after_forward: bool | int | None = None
    divisor: float | None = None

    @property
    def num_ranks(self) -> int:
        return self.extents[0] * self.extents[1]


def hybrid_mesh(extents: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", extents, mesh_dim_names=("replicate", "shard"))


def follow(program: Program) -> list[str]:
    """Follow the program with both models; return what differs, at every reduction."""
    model = build(TREE)
    oracle = Oracle(model)
    shard_tree(
        model,
        mesh=hybrid_mesh(program.extents),
        reshard_after_forward=program.reshard_after_forward,
    )
    assert isinstance(model, FSDPModule)
    if program.divisor is not None:
        oracle.num_ranks = program.divisor  # type: ignore[assignment]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(program.divisor)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    found: list[str] = []
    for place, step in enumerate(program.steps):
        x, used = inputs_for(place, dist.get_rank()), program.used[place][dist.get_rank()]
        if step in BACKWARDS:
            model.set_requires_all_reduce(step != "no_all_reduce")
            with model.no_sync() if step == "no_sync" else contextlib.nullcontext():
                for either in (model, oracle.model):
                    either(x, (True, *used[1:])).square().mean().backward()
            oracle.take()
            if step == "sync":
                oracle.reduce()
        elif step == "zero_grad":
            model.zero_grad()
            oracle.local, oracle.reduced = {}, {}
        elif not oracle_waits(oracle):  # "step"
            optimizers[0].step()
            optimizers[0].zero_grad()
            oracle.step(optimizers[1])
        model.reshard()
        if not oracle_waits(oracle):
            differs = gradient_differences(dict(model.named_parameters()), oracle)
            differs += value_differences(model.named_parameters(), oracle)
            found += [f"step {place} ({step}): {text}" for text in differs]
    return found


def oracle_waits(oracle: Oracle) -> bool:
    heard = [False] * dist.get_world_size()
    dist.all_gather_object(heard, bool(oracle.local))
    return any(heard)


def assert_same(program: Program) -> None:
    assert run_ranks(follow, program.num_ranks, program, timeout=30) == [[]] * program.num_ranks


ALL = (True,) * NUM_PARAMS
ONE_GROUP = (True, True, True, False, False, False)
OTHER_GROUP = (True, False, False, True, True, True)
EVEN = tuple(index % 2 == 0 for index in range(NUM_PARAMS))


@pytest.mark.brief(1)
@pytest.mark.parametrize("extents", [(2, 2), (2, 1), (3, 1)])
def test_without_all_reduce_microbatches_may_use_different_parameters(
    extents: tuple[int, int],
) -> None:
    num_ranks = extents[0] * extents[1]
    used = [(of_step,) * num_ranks for of_step in (ONE_GROUP, EVEN, OTHER_GROUP)]
    assert_same(Program(("no_all_reduce", "no_all_reduce", "sync"), tuple(used), extents))
    differing = tuple((ONE_GROUP, OTHER_GROUP, EVEN, ALL)[:num_ranks] for _ in range(3))
    assert_same(Program(("no_all_reduce", "no_all_reduce", "sync"), differing, extents))
    assert_same(Program(("sync", "no_all_reduce", "sync"), differing, extents))
    assert_same(Program(("no_all_reduce", "no_sync", "sync"), differing, extents))
    assert_same(Program(("sync", "no_sync", "sync"), differing, extents))
    assert_same(Program(("no_sync", "no_all_reduce", "sync"), differing, extents))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    extents = draw(st.sampled_from([(2, 2), (2, 2), (2, 1), (3, 1)]))
    ranks = extents[0] * extents[1]
    steps = draw(
        st.lists(
            st.sampled_from(["sync", "no_all_reduce", "no_sync", "step", "zero_grad"]),
            min_size=2,
            max_size=6,
        )
    )
    use = st.lists(st.booleans(), min_size=NUM_PARAMS, max_size=NUM_PARAMS).map(tuple)
    used = tuple(tuple(draw(use) for _ in range(ranks)) for _ in steps)
    reshard = draw(st.sampled_from([None, True, False]))
    return Program((*steps, "sync"), (*used, (ALL,) * ranks), extents, reshard)


@reproducible(24)
@given(programs())
def test_any_program_on_a_hybrid_mesh_gives_the_gradients_of_the_oracle(program: Program) -> None:
    assert_same(program)


@pytest.mark.brief(1)
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_a_custom_divide_factor_divides_the_sum_over_all_ranks(divisor: float) -> None:
    steps: tuple[Step, ...] = ("sync", "step", "no_all_reduce", "no_sync", "sync")
    assert_same(Program(steps, ((ALL,) * 4,) * 5, (2, 2), None, divisor))
    assert_same(Program(steps, ((ALL,) * 2,) * 5, (1, 2), None, divisor))
    assert_same(Program(steps, ((ALL,) * 2,) * 5, (2, 1), None, divisor))


# Placements and events -----------------------------------------------------------------------


@on_ranks(4)
def test_the_placements_of_a_gradient_tell_how_far_it_has_come() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 6, bias=False), mesh=hybrid_mesh((2, 2)))
    x = inputs_for(0, dist.get_rank())[:, :4]
    seen: list[object] = [model.weight.placements, tuple(model.weight.to_local().shape)]
    with model.no_sync():
        model(x).sum().backward()
    seen.append(model.weight.grad.placements)
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    seen.append(model.weight.grad.placements)
    visible = full(model.weight.grad)
    model.synchronize_gradients()  # over the replicas too
    seen.append(model.weight.grad.placements)
    model.set_requires_all_reduce(True)
    model.zero_grad()
    model(x).sum().backward()
    seen.append(model.weight.grad.placements)
    average, sharded = Partial("avg"), (Replicate(), Shard(0))
    assert seen == [sharded, (3, 4), (average, average), (average, Shard(0)), sharded, sharded]
    assert torch.allclose(visible, 2 * full(model.weight.grad))


def two_groups() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = hybrid_mesh((2, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("all_reduces", [True, False])
@on_ranks(2)
def test_the_all_reduce_of_a_group_overlaps_the_backward_of_the_next(all_reduces: bool) -> None:
    model = two_groups()
    model.set_requires_all_reduce(all_reduces)
    model(torch.ones(2, 4)).sum().backward()
    with record_events(
        model, "reduce_scatter", "wait_for_reduce_scatter", "all_reduce", "wait_for_all_reduce"
    ) as recorded:
        model(torch.ones(2, 4)).sum().backward()
    expected = [
        ("reduce_scatter", "1"),
        ("wait_for_reduce_scatter", "1"),
        ("all_reduce", "1"),
        ("reduce_scatter", "0"),
        ("wait_for_reduce_scatter", "0"),
        ("all_reduce", "0"),
        ("wait_for_all_reduce", "1"),
        ("wait_for_all_reduce", "0"),
    ]
    assert recorded == [event for event in expected if all_reduces or "all" not in event[0]]


@on_ranks(2)
def test_what_is_in_flight_goes_on_before_a_group_accumulates() -> None:
    """Leave two reductions in flight; then accumulate in the group that finishes first."""
    model = two_groups()
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_is_last_backward(False)
    with record_events(model, "all_reduce", "accumulate", "reduce_scatter") as recorded:
        model(torch.ones(2, 4)).sum().backward()
        recorded.clear()
        model[0].set_requires_gradient_sync(False)
        model(torch.ones(2, 4)).sum().backward()
    expected = ["all_reduce 1", "reduce_scatter 1", "all_reduce 0", "accumulate 0"]
    assert list(map(" ".join, recorded)) == expected


# Ranks that send, as those on other hosts do ----------------------------------------------------


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("extents", [(2, 2), (1, 3)])
def test_any_step_on_ranks_that_send(extents: tuple[int, int]) -> None:
    steps: tuple[Step, ...] = ("sync", "step", "no_all_reduce", "no_sync", "sync", "step")
    ranks = extents[0] * extents[1]
    program = Program(steps, ((ALL,) * ranks,) * len(steps), extents)
    assert run_ranks(Apart(follow), ranks, program, timeout=30) == [[]] * ranks


@on_ranks(2)
def test_a_hook_gets_what_is_averaged_over_the_replicas_once() -> None:
    """Each of three microbatches adds 2 to every element."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=hybrid_mesh((2, 1)))
    model.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    for all_reduces in (False, False, True):
        model.set_requires_all_reduce(all_reduces)
        model(torch.ones(2, 4)).sum().backward()
    assert float(full(model.weight.grad)[0, 0]) == 12.0


# Replicas that an all-reduce hook makes -----------------------------------------------------------


ROWS = 5
"""The first shard holds three of them, the second two."""

Uses = tuple[str, str]
"""How each replica uses the table: not at all, by a factor of zero, or its first or last rows."""


class Lookup(nn.Module):
    """A layer beside parameters that a batch may leave out; one of them has a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.table = nn.Embedding(ROWS, 3)
        self.scale = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        out = self.layer(x)
        if use == "none":
            return out
        rows = torch.tensor([0, 1] if use == "first" else [ROWS - 1, ROWS - 2])
        return out + self.table(rows) * self.scale * (0.0 if use == "zero" else 1.0)


def mean_over(grads: torch.Tensor, mesh: DeviceMesh) -> None:
    dist.all_reduce(grads, group=mesh.get_group("replicate"))
    grads.div_(mesh["replicate"].size())


def is_same(got: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    has = torch.tensor(float(got is not None))
    dist.all_reduce(has, dist.ReduceOp.MIN)
    if not has:
        return False
    assert got is not None and want is not None
    return torch.allclose(full(got.detach()), want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "uses",
    [
        (("none", "first"), ("last", "none")),
        (("none", "zero"), ("first", "first")),
        (("none", "none"), ("none", "last")),
    ],
    ids=["rows_of_one_shard", "zeros", "nobody"],
)
@on_ranks(4, timeout=60)
def test_shards_and_replicas_of_a_hook_stay_the_same(uses: tuple[Uses, ...]) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    oracle = Lookup()
    model = fully_shard(copy.deepcopy(oracle), mesh=mesh["shard"])
    model.set_all_reduce_hook(functools.partial(mean_over, mesh=mesh))
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5) for one in (oracle, model)
    ]
    wrong = []
    for step, of_step in enumerate(uses):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        use = of_step[mesh.get_local_rank("replicate")]
        for one in (oracle, model):
            one(x, use).square().sum().backward()
        for param in oracle.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()
        pairs = list(zip(oracle.named_parameters(), model.parameters(), strict=True))
        wrong.append([name for (name, want), got in pairs if not is_same(got.grad, want.grad)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wrong[-1] += [name for (name, want), got in pairs if not is_same(got, want)]
    assert wrong == [[]] * len(uses)


@on_ranks(4)
def test_replicas_without_new_gradients_keep_those_that_were_reduced() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = Gated()
    model = fully_shard(copy.deepcopy(reference), mesh=mesh)
    for microbatch in range(2):
        model.set_requires_all_reduce(microbatch == 0)
        is_gated = microbatch == 0 or mesh.get_coordinate()[0] == 1
        for network in (reference, model):
            network(own_input(microbatch), is_gated).square().sum().backward()
    model.synchronize_gradients()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
