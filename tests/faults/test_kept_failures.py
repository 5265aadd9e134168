"""A failed backward whose remains somebody keeps: the exception, or the engine for a while.

An exception holds the frames that it went through. The engine's threads hold a backward until they
have taken note of its failure, which may be after the caller has been told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import Net, assert_parity, own_input, train_step, two_nets
from on_ranks import on_ranks

from composable_shard.core.transport.gloo import point_to_point
from composable_shard.errors import ShardError
from composable_shard.testing import run_ranks

Keep = Callable[[Net, list[object]], None]


def failing_at_the_end(model: Net, kept: list[object]) -> None:
    """Fail in the callback that ends the backward, and keep the exception."""
    is_armed = [True]

    def fail_once(_: torch.Tensor) -> None:
        if is_armed.pop() if is_armed else False:
            raise ValueError("while gradients are handed out")

    model.set_all_reduce_hook(fail_once)
    try:
        model(own_input(9)).square().sum().backward()
    except ValueError as error:
        kept.append(error)
    assert not is_armed


def failing_at_the_bottom(model: Net, kept: list[object]) -> None:
    """Fail in a node of the backward, and keep the exception and what the engine holds."""
    engine: Any = torch.autograd.Variable._execution_engine

    def queue(callback: Callable[[], None]) -> None:
        kept.append(callback)
        engine.queue_callback(callback)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in a node")

    x = own_input(9).requires_grad_()
    x.register_hook(fail)
    holding = mock.patch.object(
        torch.autograd.Variable, "_execution_engine", mock.Mock(wraps=engine, queue_callback=queue)
    )
    with holding, pytest.raises(ValueError, match="in a node") as caught:
        model(x).square().sum().backward()
    kept.append(caught.value)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("fail", [failing_at_the_end, failing_at_the_bottom])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_training_goes_on(fail: Keep, evaluates: bool) -> None:
    reference, model = two_nets(2)
    kept: list[object] = []
    for step in range(4):
        model.zero_grad()
        if step == 2:
            fail(model, kept)
            model.zero_grad()
            if evaluates:
                with torch.no_grad():
                    model(own_input(7))
        train_step(model, step, None)
    assert len(kept) == 1 + (fail is failing_at_the_bottom) and isinstance(kept[-1], ValueError)
    train_step(reference, 3, None)
    assert_parity(model, reference)


class LateMessage:
    """Stands for the work of a message that does not come within the time-out."""

    @staticmethod
    def wait() -> None:
        raise RuntimeError("time-out")


def works_kept() -> int:
    """Count the works of two messages that somebody still holds who holds the error."""
    group, works = dist.group.WORLD, [LateMessage(), LateMessage()]
    assert group is not None
    left = [weakref.ref(work) for work in works]
    messages = point_to_point._Messages(group, 0)
    messages._works = [(cast(Any, work), 0) for work in works]
    works.clear()
    with pytest.raises(ShardError) as caught:
        messages.wait()
    assert caught.value.__cause__ is not None
    return sum(work() is not None for work in left)


def test_what_writes_a_late_message_is_not_kept() -> None:
    assert run_ranks(works_kept, 1, timeout=30) == [0]
