"""A backward on another thread than its forward, as that of a device always is.

Here the caller is a thread, or checkpoints lie so deep within each other that autograd takes one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from nets import Checkpointed, Net, Reentrant, assert_parity, average_gradients, own_input, two_nets

from composable_shard.testing import run_ranks


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
