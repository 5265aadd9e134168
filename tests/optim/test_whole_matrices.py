"""Whole matrices on sharded parameters, bit by bit as by stock optimizers on unsharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import own_input, two_nets
from on_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from training.cases import reproducible

from composable_shard.optim import Owned, Sharded, with_layout
from composable_shard.testing import run_ranks
from optim.whole import (
    EXTENTS,
    Oracle,
    Spec,
    adamw,
    assert_equal,
    assert_states_equal,
    momentum,
    muon,
    num_ranks_of,
    optimizer_of,
    set_gradients,
    sharded,
    spec_lists,
)

SPECS = [
    Spec((8, 6)),
    Spec((5, 7)),
    Spec((7, 3), dim=1),
    Spec((1, 9)),
    Spec((12, 4), (4, 4, 4)),
    Spec((3, 5), "sharded"),
    Spec((4, 6, 5)),
    Spec((3, 6, 5), (2, 4)),
    Spec((2, 6, 5), dim=1),
    Spec((6,), "sharded"),
    Spec((6, 8)),
]


# Bits ----------------------------------------------------------------------------------------


def train(
    specs: Sequence[Spec],
    extents: Sequence[int],
    all_bucket_nbytes: Sequence[int],
    stock: Any = muon,
    ranks: Sequence[Sequence[int]] = (),
) -> None:
    for bucket_nbytes in all_bucket_nbytes:
        model, oracle = sharded(specs, extents, ranks=ranks), Oracle(specs, stock)
        optimizer = optimizer_of(model, specs, stock, bucket_nbytes=bucket_nbytes)
        for step in range(3):
            without = [step] if step < len(specs) else []
            set_gradients(model, step, without)
            oracle.set_gradients(step, without)
            optimizer.step()
            oracle.step()
            assert_equal(model, oracle)
        assert_states_equal(get_optimizer_state_dict(model, optimizer)["state"], oracle)


def test_a_mesh_whose_rows_are_interleaved() -> None:
    """Its process group sorts the ranks; their places on the mesh are in another order."""
    run_ranks(train, 4, SPECS, (2, 2), [1, 300, 2**26], ranks=[[0, 2], [1, 3]])


@reproducible(16)
@given(spec_lists, st.sampled_from(EXTENTS), st.sampled_from([1, 200, 2**26]), st.booleans())
def test_generated_parameters(
    specs: list[Spec], extents: tuple[int, ...], bucket_nbytes: int, is_muon: bool
) -> None:
    stock = muon if is_muon else momentum
    run_ranks(train, num_ranks_of(extents), specs, extents, [bucket_nbytes], stock)


# Training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_training_with_schedules_clipping_and_accumulation() -> None:
    reference, model = two_nets()
    layouts = {lambda name, param: param.ndim == 2: Owned(muon), "*": Sharded(adamw)}
    optimizer = with_layout(model, layouts)
    params = list(reference.parameters())
    stock = [muon([p for p in params if p.ndim == 2]), adamw([p for p in params if p.ndim != 2])]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, *stock)]
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(own_input(step * 2 + micro)).square().sum().backward()
        model.clip_grad_norm_(0.5)
        for param, other in zip(model.parameters(), params, strict=True):
            other.grad = param.grad.full_tensor()  # to the bit, whatever the order of sums
        for one in (optimizer, *stock):
            one.step()
            one.zero_grad()
        for schedule in schedules:
            schedule.step()
        for param, other in zip(model.parameters(), params, strict=True):
            assert param.grad is None
            assert torch.equal(param.full_tensor(), other)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 0.01 / 8]
