"""A backward on another thread than its forward, as that of a device always is.

Autograd has one thread for each device; on the CPU it uses the caller's. Here the caller is a
thread of its own, or checkpoints lie so deep within each other that autograd takes a thread of its
own. ``test_device_thread.py`` has the thread of a device, without values.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nets import Checkpointed, Net, Reentrant, assert_parity, average_gradients, own_input, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import run_ranks

TOO_DEEP = 63  # backwards within each other; from 60 on autograd changes the thread


def in_other_thread(act: Callable[[], object]) -> None:
    """Run ``act`` in a new thread and raise here what it raises there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - it is raised again
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def train(make: type[Net], syncs: tuple[bool, ...], alternates: bool) -> list[bool]:
    """Train for three steps; return for each backward whether its hooks ran in this thread."""
    reference, model = two_nets(make=make)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, reference)]
    threads: list[bool] = []
    for step in range(3):
        for microbatch, sync in enumerate(syncs):
            x = own_input(10 * step + microbatch)
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = model(x).square().sum()
                loss.register_hook(lambda _: threads.append(is_main()))
                if alternates and step == 1:
                    loss.backward()
                else:
                    in_other_thread(loss.backward)
            reference(x).square().sum().backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(model, reference)
    return threads


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("syncs", [(True,), (False, True)])
@pytest.mark.parametrize("make", [Net, Checkpointed, Reentrant])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_the_unsharded_model(
    ranks: int, make: type[Net], syncs: tuple[bool, ...], alternates: bool
) -> None:
    threads = [alternates and step == 1 for step in range(3) for _ in syncs]
    assert run_ranks(train, ranks, make, syncs, alternates) == [threads] * ranks


def in_low_precision() -> bool:
    """Compare the gradients of a backward in another thread with those of one in this."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(two_nets(mp_policy=policy)[1])
    here, there = models
    for step in range(2):
        here(own_input(step)).float().square().sum().backward()
        in_other_thread(there(own_input(step)).float().square().sum().backward)
    pairs = zip(here.parameters(), there.parameters(), strict=True)
    return all(torch.equal(mine.grad.to_local(), other.grad.to_local()) for mine, other in pairs)


def test_low_precision() -> None:
    assert run_ranks(in_low_precision, 2) == [True] * 2


class Failure(Exception):
    """What fails."""


@on_ranks(2)
def test_the_next_iteration_after_a_failure_there() -> None:
    """Fail in a backward of another thread, then train on in this one."""
    reference, model = two_nets()
    kept: list[BaseException] = []

    def fail(_: torch.Tensor) -> None:
        raise Failure

    for step in range(3):
        model.zero_grad()
        x = own_input(step).requires_grad_()
        loss = model(x).square().sum()
        if step == 1:
            x.register_hook(fail)
            with pytest.raises(Failure) as caught:
                in_other_thread(loss.backward)
            kept.append(caught.value)
        else:
            loss.backward()
    reference(own_input(2)).square().sum().backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)


# A thread of autograd's own -------------------------------------------------------------------


def nested(depth: int, fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    """Call ``fn`` within checkpoints within each other."""
    if depth == 0:
        return fn(x)
    return checkpoint(nested, depth - 1, fn, x, use_reentrant=True)


class Deep(Net):
    """Runs its last block within ``depth`` checkpoints; notes where its backward runs."""

    depth = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        return self.out(nested(self.depth, partial(noted, self.blocks[1]), x))


THREADS: set[bool] = set()


def noted(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block(x)
    if y.requires_grad:
        y.register_hook(lambda _: THREADS.add(is_main()))
    return y


def train_deep(depth: int) -> list[bool]:
    reference, model = two_nets(make=Deep)
    model.depth = depth
    THREADS.clear()
    for step in range(2):
        model.zero_grad()
        model(own_input(step)).square().sum().backward()
    found = sorted(THREADS)
    reference(own_input(1)).square().sum().backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
    return found


@pytest.mark.parametrize("depth", [1, TOO_DEEP])
def test_checkpoints_so_deep_that_autograd_changes_the_thread(depth: int) -> None:
    assert run_ranks(train_deep, 2, depth) == [[depth == 1]] * 2
