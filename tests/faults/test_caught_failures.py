"""Failures that the model or the loop around it handles, and goes on."""

from __future__ import annotations

import pytest
import torch
from dist.models import Net, assert_parity, average_gradients, own_input, train_step, two_nets
from torch.distributed.tensor import DTensor

from composable_shard.testing import run_ranks
from faults.test_failed_iterations import (
    Break,
    Failure,
    Interrupt,
    after_root,
    before_block,
    before_root,
    within_block,
)


class Lenient(Net):
    """Goes on without a block that fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            try:
                x = block(x)
            except (Failure, Interrupt):
                x = x * 2
        return self.out(x)


def caught_within(break_at: Break, error: type[BaseException]) -> None:
    """The root catches what a block raises; the block then has no gradient."""
    reference, model = two_nets(2, make=Lenient)
    for step in range(3):
        for one in (model, reference):
            one.zero_grad()
            handle = break_at(one, error) if step == 1 else None
            train_step(one, step, None)
            if handle is not None:
                handle.remove()
        assert_parity(model, reference)
    model.reshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("error", [Failure, Interrupt])
@pytest.mark.parametrize("break_at", [before_block, within_block])
def test_a_failure_that_the_root_catches(break_at: Break, error: type[BaseException]) -> None:
    run_ranks(caught_within, 2, break_at, error)


class Storing(Net):
    """Returns nothing and stores its loss."""

    loss: torch.Tensor

    def forward(self, x: torch.Tensor) -> None:
        self.loss = super().forward(x).square().sum()


def retried_while_handling(fails: bool) -> None:
    """The forward that goes well runs while another exception is being handled."""
    reference, model = two_nets(2, make=Storing)
    for step in range(3):
        try:
            handle = within_block(model, Failure) if fails else None
            if fails:
                model(own_input(7))
            raise Failure
        except Failure:
            if handle is not None:
                handle.remove()
            model(own_input(step))
            model.loss.backward()
        reference(own_input(step))
        reference.loss.backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_within_an_exception_handler(fails: bool) -> None:
    run_ranks(retried_while_handling, 2, fails)


def failed_evaluation(break_at: Break) -> None:
    """A forward without gradients fails between two training iterations."""
    reference, model = two_nets(2)
    train_step(model, 0, None)
    train_step(reference, 0, None)
    handle = break_at(model, Failure)
    with pytest.raises(Failure), torch.no_grad():
        model(own_input(1))
    handle.remove()
    assert_parity_of_gradients(model, reference)
    with torch.no_grad():
        assert torch.equal(model(own_input(2)), reference(own_input(2)))
    model.zero_grad()
    reference.zero_grad()
    train_step(model, 3, None)
    train_step(reference, 3, None)
    assert_parity(model, reference)


def assert_parity_of_gradients(model: Net, reference: Net) -> None:
    """Gradients of an earlier iteration survive a failure."""
    model.reset_iter_state()
    assert_parity(model, reference)


@pytest.mark.parametrize("break_at", [before_root, within_block, after_root])
def test_a_failed_evaluation_keeps_reduced_gradients(break_at: Break) -> None:
    run_ranks(failed_evaluation, 2, break_at)
