"""Out of memory in forward or backward: the next iteration runs, and nobody need call anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from nets import Net, assert_parity, own_input, train_step, two_nets
from on_ranks import on_ranks

from composable_shard import _torch
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

OOM = torch.OutOfMemoryError


def fail(*_: object) -> None:
    raise OOM("in a hook")


def on_output(model: Net) -> Any:
    """A hook on a tensor, hung up while the block runs."""

    def hang(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    return model.blocks[1].register_forward_hook(hang)


def on_module_before(model: Net) -> Any:
    return model.blocks[0].register_full_backward_pre_hook(fail)


def on_module_after(model: Net) -> Any:
    return model.blocks[1].register_full_backward_hook(fail)


def within(model: Net) -> Any:
    return model.blocks[1].up.register_full_backward_hook(fail)


def on_last_node(model: Net) -> Any:
    """A hook on the last node of all, when most groups are reduced."""

    def hang(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    return model.inp.register_forward_hook(hang)


def train_with_failing_hook(hang: Callable[[Net], Any], retries: bool) -> None:
    reference, model = two_nets(2)
    for step in range(4):
        model.zero_grad()
        reference.zero_grad()
        if step in (0, 2):
            handle = hang(model)
            loss = model(own_input(step)).square().sum()
            for _ in range(2 if retries else 1):
                with pytest.raises(OOM, match="in a hook"):
                    loss.backward(retain_graph=True)
            handle.remove()
            model.zero_grad()
            del loss
            continue
        with record_events(model, "reduce_scatter") as recorded:
            train_step(model, step, None)
        train_step(reference, step, None)
        assert_parity(model, reference)
        assert recorded == [("reduce_scatter", name) for name in ("blocks.1", "blocks.0", "")]


@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize(
    "hang", [on_output, on_module_before, on_module_after, within, on_last_node]
)
def test_out_of_memory_in_a_backward_hook(hang: Callable[[Net], Any], retries: bool) -> None:
    run_ranks(partial(train_with_failing_hook, hang, retries), 2)


@on_ranks(2)
def test_out_of_memory_when_gathering() -> None:
    """The allocation of the gathered parameters itself fails, in forward and in backward."""
    reference, model = two_nets(2)
    allocate, left = _torch.allocate, [0]

    def failing(tensor: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OOM("when gathering")
        allocate(tensor)

    for step in range(5):
        model.zero_grad()
        reference.zero_grad()
        if step in (1, 3):
            with (
                mock.patch.object(_torch, "allocate", failing),
                pytest.raises(OOM, match="when gathering"),
            ):
                left[0] = 2 if step == 1 else 0
                loss = model(own_input(step)).square().sum()
                left[0] = 2
                loss.backward()
            continue
        train_step(model, step, None)
        train_step(reference, step, None)
        assert_parity(model, reference)
