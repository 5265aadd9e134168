"""An iteration that fails is as if it had not been: the next one needs no manual call.

The oracle is the unsharded model that never ran the failed iteration.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import (
    Checkpointed,
    Net,
    assert_parity,
    assert_trains_alike,
    own_input,
    train_step,
    two_nets,
)
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor

from composable_shard.core.transport.gloo import point_to_point
from composable_shard.errors import ShardError
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks
from faults.raising import (
    BACKWARD,
    FORWARD,
    Break,
    FailInBackward,
    Failure,
    Interrupt,
    after_block,
    after_root,
    before_root,
    between_blocks,
    fail,
    failing_step,
    train_with_failure,
    within_block,
)


@pytest.mark.parametrize("fail_in", [0, 1])
@pytest.mark.parametrize("error", [Failure, Interrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("break_at", FORWARD + BACKWARD, ids=str)
def test_the_next_iteration_is_as_if_none_had_failed(
    break_at: Break, error: type[BaseException], fail_in: int
) -> None:
    run_ranks(train_with_failure, 2, break_at, error, fail_in)


@pytest.mark.parametrize("break_at", [within_block, between_blocks], ids=str)
def test_failures_on_one_and_on_three_ranks(break_at: Break) -> None:
    for num_ranks in (1, 3):
        run_ranks(train_with_failure, num_ranks, break_at, Failure, 1)


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("break_at", BACKWARD, ids=str)
@on_ranks(2)
def test_a_failed_backward_may_be_tried_again(break_at: Break, num_failures: int) -> None:
    reference, model = two_nets(2)
    for step in range(2):
        train_step(model, step, None)
        model.zero_grad()
    handle = break_at(model, Failure)
    out = model(own_input(2))
    handle.remove()
    for _ in range(num_failures):
        with pytest.raises(Failure):
            out.square().sum().backward(retain_graph=True)
        model.zero_grad()
    with mock.patch.object(FailInBackward, "backward", lambda ctx, grad: (grad, None)):
        out.square().sum().backward()
    train_step(reference, 2, None)
    assert_parity(model, reference)


@pytest.mark.parametrize("error", [Failure, Interrupt])
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_a_recomputation_that_fails(reentrant: bool, error: type[BaseException]) -> None:
    reference, model = two_nets(2, make=Checkpointed)
    model.use_reentrant = reentrant
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(4):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            if step != 2:
                train_step(one, step, optimizer)
            elif one is model:
                loss = model(own_input(step)).square().sum()
                handle = model.blocks[1].up.register_forward_hook(partial(fail, error))
                with pytest.raises(error):
                    loss.backward()
                handle.remove()
    assert_parity(model, reference)


@pytest.mark.parametrize("break_at", [before_root, within_block, after_root], ids=str)
@on_ranks(2)
def test_a_failed_evaluation_keeps_reduced_gradients(break_at: Break) -> None:
    reference, model = two_nets(2)
    train_step(model, 0, None)
    train_step(reference, 0, None)
    handle = break_at(model, Failure)
    with pytest.raises(Failure), torch.no_grad():
        model(own_input(1))
    handle.remove()
    model.reset_iter_state()
    assert_parity(model, reference)  # gradients of an earlier iteration survive a failure
    with torch.no_grad():
        assert torch.equal(model(own_input(2)), reference(own_input(2)))
    model.zero_grad()
    reference.zero_grad()
    assert_trains_alike(model, reference, 3)


# reset_iter_state, harmless at any time -----------------------------------------------------------


@pytest.mark.parametrize("of_block", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_reset_before_the_first_forward(of_block: bool) -> None:
    reference, model = two_nets(2)
    target = model.blocks[1] if of_block else model
    with record_events(model) as recorded:
        target.reset_iter_state()
        target.reset_iter_state()
    assert recorded == []
    for step in range(2):
        assert_trains_alike(model, reference, step)


@pytest.mark.parametrize("is_added", [False, True])
@on_ranks(2)
def test_reset_drops_accumulated_gradients(is_added: bool) -> None:
    """What waits is dropped with what it was added to, in all groups whatever it was called on."""
    reference, model = two_nets(2)
    if is_added:
        train_step(model, 6, None)
    with model.no_sync():
        model(own_input(7)).square().sum().backward()
    assert all(param.grad.placements[0].is_partial() for param in model.parameters())
    model.blocks[0].reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    assert_trains_alike(model, reference, 1)


@on_ranks(2)
def test_reset_drops_reductions_in_flight() -> None:
    reference, model = two_nets(2)
    model.set_is_last_backward(False)
    model(own_input(7)).square().sum().backward()
    model.reset_iter_state()
    model.set_is_last_backward(True)
    assert model.inp.weight.grad is None  # of the root, whose reduction was the last
    model.zero_grad()
    assert_trains_alike(model, reference, 1)


@pytest.mark.parametrize("break_at", [after_block, between_blocks], ids=str)
@on_ranks(2)
def test_reset_after_a_failure_drops_what_is_not_reduced(break_at: Break) -> None:
    """A failure amid accumulation, then a reset: all that is not reduced is gone."""
    reference, model = two_nets(2)
    with model.no_sync():
        model(own_input(5)).square().sum().backward()
    failing_step(model, 7, break_at, Failure)
    model.reset_iter_state()
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.grad is None or not param.grad.placements[0].is_partial()
    model.zero_grad()
    assert_trains_alike(model, reference, 1)


# A failed backward whose remains somebody keeps ---------------------------------------------------


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
