"""What ``explain`` says of an optimizer's step is what the step sends, steps and occupies."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from new_objects import seen_alone
from torch import nn
from training.cases import reproducible

from composable_shard import explain
from composable_shard.insight.estimate import LiveBytes
from composable_shard.insight.group_steps import Traffic, total
from composable_shard.optim import Owned, Sharded, flat, with_layout
from composable_shard.testing import fake_ranks, run_ranks
from optim.whole import (
    EXTENTS,
    AllToAlls,
    Spec,
    num_ranks_of,
    optimizer_of,
    set_gradients,
    sharded,
    spec_lists,
)
from tests.insight.models import Stack, shard

Specs, Extents = Sequence[Spec], Sequence[int]
plain_sgd = partial(torch.optim.SGD, lr=0.1, foreach=False)  # needs no memory of its own


def stepped(specs: Specs, extents: Extents, nbytes: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model with an optimizer that has its states, and gradients for another step."""
    model = sharded(specs, extents)
    optimizer = optimizer_of(model, specs, plain_sgd, bucket_nbytes=nbytes)
    set_gradients(model, 0)
    optimizer.step()
    set_gradients(model, 1)
    return model, optimizer


def told_and_sent(specs: Specs, extents: Extents, all_nbytes: Sequence[int]) -> list[int]:
    """Compare what is explained with what is sent; return the launches by size of buckets."""
    launches = []
    for nbytes in all_nbytes:
        model, optimizer = stepped(specs, extents, nbytes)
        told = explain(model, optimizer).optimizer
        with AllToAlls() as counted:
            optimizer.step()
        assert told is not None and explain(model, optimizer).optimizer == told
        assert told.traffic == total(counted.sent)
        launches.append(told.traffic.launches)
    return launches


def held_by_step(specs: Specs, extents: Extents, nbytes: int) -> int:
    """Return the most bytes that a step holds at once, of those that it makes."""
    (_, optimizer), live = stepped(specs, extents, nbytes), LiveBytes()
    live.count([one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)], "")
    with live:
        optimizer.step()
    return live.peak.activations


def send_nothing(*_: Any, **__: Any) -> None:
    pass


def held_by_each(specs: Specs, extents: Extents, nbytes: int) -> list[int]:
    """Ask every rank in turn, and send nothing: gloo's worker holds tensors a little longer."""
    found, num_ranks = [], num_ranks_of(extents)
    with seen_alone(), mock.patch.object(dist, "all_to_all_single", send_nothing):
        for rank in range(num_ranks):
            with fake_ranks(num_ranks, rank):
                found.append(held_by_step(specs, extents, nbytes))
    return found


@reproducible(8)
@given(spec_lists, st.sampled_from(EXTENTS), st.sampled_from([1, 200, 2**26]))
def test_generated_parameters(specs: list[Spec], extents: tuple[int, ...], nbytes: int) -> None:
    run_ranks(told_and_sent, num_ranks_of(extents), specs, extents, [nbytes])


@pytest.mark.brief(2)
@pytest.mark.parametrize("num_ranks", [4, 2, 3, 8])
def test_a_step_holds_at_most_two_buckets(num_ranks: int) -> None:
    """However many there are; values, gradients and messages all counted."""
    in_a_bucket = [Spec((24, 24)) for _ in range(num_ranks)]
    nbytes = sum(4 * torch.Size(spec.shape).numel() for spec in in_a_bucket)
    for held in held_by_each(in_a_bucket * 6, (num_ranks,), nbytes):
        # Updated values, their messages, and those of two times as much to the owners.
        part = 1 / num_ranks
        assert held == round(nbytes * (part + 6 * part * (1 - part))) <= 2 * nbytes


# Flat steps, and stock ones -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wraps", "options", "layout", "nums"),
    [
        (flat, {"foreach": True}, "flat", [2, 1]),
        (flat, {"fused": True}, "flat", [4, 1]),  # on the CPU none behind 24 elements
        (lambda one: one, {}, "stock", [8, 2]),
    ],
)
def test_tensors_are_those_that_are_stepped(
    wraps: Any, options: dict[str, Any], layout: str, nums: list[int]
) -> None:
    with fake_ranks(2):
        model: Any = shard(Stack(32, 48))
        model.before.weight.requires_grad_(False)
        groups = [{"params": model.layers.parameters()}, {"params": model.after.parameters()}]
        groups[1]["params"] = [model.before.weight, *model.after.parameters()]  # type: ignore[assignment]
        optimizer = wraps(torch.optim.AdamW(groups, **options))
        model(torch.ones(2, 32)).sum().backward()
        stepped: list[int] = []
        real = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

        def count(self: Any, closure: Any = None) -> Any:
            with_grad = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
            stepped.extend(map(len, with_grad))
            return real(self, closure)

        with mock.patch.object(torch.optim.AdamW, "step", count):
            told = explain(model, optimizer).optimizer
            optimizer.step()
    assert told is not None
    assert [group.num_tensors for group in told.groups] == stepped == nums
    assert [group.num_parameters for group in told.groups] == [8, 2]
    assert {group.layout for group in told.groups} == {layout}
    assert told.traffic == Traffic()


TEXT = """\
A step of with_layout: tensors to step, messages and bytes to send, on this rank
  parameter group  layout   parameters  elements  tensors  launches  messages    sent
  0                Owned             4    6.14 k        2         2         2  18 KiB
  1                Sharded           7    1.45 k        5         0         0     0 B

Optimizer
  - work of the busiest rank / mean work of all ranks: 1"""


def test_the_text() -> None:
    with fake_ranks(2):
        model = shard(Stack(32, 48))
        owned, others = Owned(torch.optim.Muon), Sharded(torch.optim.AdamW)
        optimizer = with_layout(model, {"layers.*.weight": owned, "*": others})
        text = str(explain(model, optimizer))
        of_flat = str(explain(model, flat(plain_sgd(model.parameters()))))
        assert "A step of FlatSGD: " in of_flat
        assert "\n  - adjacent shards are stepped as one tensor, and no messages" in of_flat
    assert TEXT in text
