"""An iteration that fails is as if it had not been: the next one needs no manual call.

The oracle is the unsharded model that never ran the failed iteration.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from nets import (
    Checkpointed,
    assert_parity,
    own_input,
    train_step,
    two_nets,
)
from on_ranks import on_ranks

from composable_shard.testing import run_ranks
from faults.raising import (
    BACKWARD,
    FORWARD,
    Break,
    FailInBackward,
    Failure,
    Interrupt,
    after_root,
    before_root,
    between_blocks,
    fail,
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
    _Passing.install()
    try:
        out.square().sum().backward()
    finally:
        _Passing.remove()
    train_step(reference, 2, None)
    assert_parity(model, reference)


class _Passing:
    """Makes the failing function pass on its gradient."""

    original = staticmethod(FailInBackward.backward)

    @classmethod
    def install(cls) -> None:
        FailInBackward.backward = staticmethod(lambda ctx, grad: (grad, None))

    @classmethod
    def remove(cls) -> None:
        FailInBackward.backward = cls.original


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
    train_step(model, 3, None)
    train_step(reference, 3, None)
    assert_parity(model, reference)
