"""An iteration that fails is as if it had not been: the next one needs no manual call.

The oracle is the unsharded model that never ran the failed iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dist.models import Net, assert_parity, own_input, train_step, two_nets
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks


class Failure(Exception):
    """What fails."""


class Interrupt(BaseException):
    """What fails and is not an ``Exception``, as an interrupt from the keyboard."""


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ctx.error("in backward")


def fail(error: type[BaseException], *_: object) -> None:
    raise error("in forward")


def fail_backward(error: type[BaseException], module: nn.Module, args: Any, output: Any) -> Any:
    return _FailInBackward.apply(output, error)


# Where a forward fails: each registers a hook and returns its handle.


def before_root(model: Net, error: type[BaseException]) -> Any:
    return model.register_forward_pre_hook(partial(fail, error))


def in_first_layer(model: Net, error: type[BaseException]) -> Any:
    return model.inp.register_forward_hook(partial(fail, error))


def before_block(model: Net, error: type[BaseException]) -> Any:
    return model.blocks[0].register_forward_pre_hook(partial(fail, error))


def within_block(model: Net, error: type[BaseException]) -> Any:
    return model.blocks[1].up.register_forward_hook(partial(fail, error))


def after_block(model: Net, error: type[BaseException]) -> Any:
    return model.blocks[0].register_forward_hook(partial(fail, error))


def after_root(model: Net, error: type[BaseException]) -> Any:
    return model.register_forward_hook(partial(fail, error))


# Where a backward fails: after the forward of this module has been differentiated no further.


def below_head(model: Net, error: type[BaseException]) -> Any:
    return model.blocks[1].register_forward_hook(partial(fail_backward, error))


def within_second(model: Net, error: type[BaseException]) -> Any:
    return model.blocks[1].up.register_forward_hook(partial(fail_backward, error))


def between_blocks(model: Net, error: type[BaseException]) -> Any:
    return model.blocks[0].register_forward_hook(partial(fail_backward, error))


def at_the_bottom(model: Net, error: type[BaseException]) -> Any:
    return model.inp.register_forward_hook(partial(fail_backward, error))


Break = Callable[[Net, type[BaseException]], Any]
FORWARD = [before_root, in_first_layer, before_block, within_block, after_block, after_root]
BACKWARD = [below_head, within_second, between_blocks, at_the_bottom]


def failing_step(model: Net, step: int, break_at: Break, error: type[BaseException]) -> None:
    handle = break_at(model, error)
    with pytest.raises(error):
        model(own_input(step)).square().sum().backward()
    handle.remove()


def train_with_failure(break_at: Break, error: type[BaseException], fail_in: int) -> None:
    reference, model = two_nets(2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(4):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            if step == fail_in:
                if one is model:
                    failing_step(model, step, break_at, error)
                continue
            train_step(one, step, None)
            optimizer.step()
    assert_parity(model, reference)


@pytest.mark.parametrize("fail_in", [0, 1])
@pytest.mark.parametrize("error", [Failure, Interrupt])
@pytest.mark.parametrize("break_at", FORWARD + BACKWARD)
def test_the_next_iteration_is_as_if_none_had_failed(
    break_at: Break, error: type[BaseException], fail_in: int
) -> None:
    run_ranks(train_with_failure, 2, break_at, error, fail_in)


@pytest.mark.parametrize("break_at", [within_block, between_blocks])
def test_failures_on_one_and_on_three_ranks(break_at: Break) -> None:
    for num_ranks in (1, 3):
        run_ranks(train_with_failure, num_ranks, break_at, Failure, 1)


def events_after_failure(break_at: Break, error: type[BaseException]) -> None:
    """Compare the events of an iteration after a failed one with those of one before it."""
    _, model = two_nets(2)
    for step in range(2):
        train_step(model, step, None)
    with record_events(model) as before:
        train_step(model, 2, None)
    failing_step(model, 3, break_at, error)
    with record_events(model) as after:
        train_step(model, 4, None)
    # What the failed iteration left unsharded may be freed first, or, the root, be used again.
    start = after.index(("pre_forward", ""))
    assert all(event == "reshard" for event, _ in after[:start]), after[:start]
    assert reductions(after[start:]) == reductions(before)
    assert others(after[start:]) == others(before)
    # A forward that had ended may be a part of the loss: it is reduced where that would be.
    if break_at is not after_root:
        assert without_root_gather(after[start:]) == without_root_gather(before)


ROOT_GATHER = [("all_gather", ""), ("wait_for_all_gather", "")]


def without_root_gather(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [event for event in events if event not in ROOT_GATHER]


def reductions(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [event for event in events if "reduce_scatter" in event[0]]


def others(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [event for event in without_root_gather(events) if event not in reductions(events)]


@pytest.mark.parametrize("error", [Failure, Interrupt])
@pytest.mark.parametrize("break_at", FORWARD + BACKWARD)
def test_the_next_iteration_has_the_same_events(
    break_at: Break, error: type[BaseException]
) -> None:
    run_ranks(events_after_failure, 2, break_at, error)


def retried_backward(break_at: Break, num_failures: int) -> None:
    """Run the same backward again after it has failed."""
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

    original = staticmethod(_FailInBackward.backward)

    @classmethod
    def install(cls) -> None:
        _FailInBackward.backward = staticmethod(lambda ctx, grad: (grad, None))

    @classmethod
    def remove(cls) -> None:
        _FailInBackward.backward = cls.original


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("break_at", BACKWARD)
def test_a_failed_backward_may_be_tried_again(break_at: Break, num_failures: int) -> None:
    run_ranks(retried_backward, 2, break_at, num_failures)


class Checkpointed(Net):
    """Recomputes its blocks in backward."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


def failed_recomputation(reentrant: bool, error: type[BaseException]) -> None:
    """The second block fails when it is recomputed, and never otherwise."""
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


@pytest.mark.parametrize("error", [Failure, Interrupt])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_that_fails(reentrant: bool, error: type[BaseException]) -> None:
    run_ranks(failed_recomputation, 2, reentrant, error)
