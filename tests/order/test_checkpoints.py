"""Activation checkpoints in three forms gather each block once more than forward, at most."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import Block, Checkpointed, Net, Reentrant, assert_same, average_gradients, own_input
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks
from order.recording import events, short

FORMS = ("reentrant", "not reentrant", "reentrant wrapper", "wrapper")
NUM_BLOCKS = 3


class CheckpointedInside(Block):
    """Recomputes its own forward: the checkpoint lies within the sharded module."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def checkpointed(reference: Net, form: str, inside: bool, **options: Any) -> nn.Module:
    model = copy.deepcopy(reference)
    reentrant = form.startswith("reentrant")
    if form.endswith("wrapper"):
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for index, block in enumerate(model.blocks):
            if inside:
                wrapped = checkpoint_wrapper(block, checkpoint_impl=impl)
                model.blocks[index] = fully_shard(wrapped, **options)
            else:
                wrapped = checkpoint_wrapper(fully_shard(block, **options), checkpoint_impl=impl)
                model.blocks[index] = wrapped
        return fully_shard(model, **options)
    if inside:
        for block in model.blocks:
            block.__class__ = CheckpointedInside
            block.use_reentrant = reentrant
    else:
        model.__class__ = Reentrant if reentrant else Checkpointed
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def compare(model: nn.Module, reference: nn.Module) -> None:
    wrapped = "._checkpoint_wrapped_module"
    for (name, param), (expected_name, expected) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name.replace(wrapped, "") == expected_name
        assert_same(param.grad, expected.grad, name)
        assert_same(param, expected.detach(), name)


def recorded(form: str, inside: bool, reshard: bool | None) -> list[list[str]]:
    reference = Net(NUM_BLOCKS)
    model = checkpointed(reference, form, inside, reshard_after_forward=reshard)
    parts = []
    for step in range(3):
        with record_events(model) as forward:
            loss = model(own_input(step)).square().sum()
        with record_events(model) as backward:
            loss.backward()
        expected = reference(own_input(step)).square().sum()
        expected.backward()
        assert_same(loss, expected.detach())
        average_gradients(reference.parameters())
        compare(model, reference)
        model.zero_grad()
        reference.zero_grad()
        parts += [short(forward), short(backward)]
    return [[item.replace("._checkpoint_wrapped_module", "") for item in part] for part in parts]


def on_ranks(form: str, inside: bool, reshard: bool | None) -> list[list[str]]:
    first, second = run_ranks(recorded, 2, form, inside, reshard)
    assert first == second
    return first


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("form", FORMS)
def test_checkpointing_gathers_each_block_once_more_at_most(
    form: str, inside: bool, reshard: bool | None
) -> None:
    parts = on_ranks(form, inside, reshard)
    for forward, backward in zip(parts[::2], parts[1::2], strict=True):
        for group in ("root", *map(str, range(NUM_BLOCKS))):
            assert forward.count(f"gather {group}") == 1, (group, forward)
            kept = reshard is False or (group == "root" and reshard is None)
            assert backward.count(f"gather {group}") == (0 if kept else 1), (group, backward)
            assert backward.count(f"reduce {group}") == 1
            assert backward.count(f"free {group}") == 1
        assert [item for item in backward if "free" not in item][-1] == "finish root"


BACKWARD = """
    pre_backward root, gather 2,
    pre_backward 2, gather 1, wait 2, post_backward 2, free 2, reduce 2,
    pre_backward 1, gather 0, wait 1, post_backward 1, free 1, finish 2, reduce 1,
    pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
    post_backward root, finish 0, reduce root, finish root, free root"""


@pytest.mark.parametrize("form", ["not reentrant", "wrapper"])
def test_checkpointing_prefetches_as_without(form: str) -> None:
    for inside in (True, False):
        backward = on_ranks(form, inside, None)[-1]
        assert [item for item in backward if "forward" not in item] == events(BACKWARD)
