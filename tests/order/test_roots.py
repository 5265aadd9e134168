"""Several roots in one training step, with and without a shared bound on their reductions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from nets import Net, assert_parity, average_gradients, own_input, shard_net
from torch import nn

import composable_shard
from composable_shard import fully_shard, share_comm_ctx
from composable_shard.insight.events import listening
from composable_shard.testing import fake_ranks, run_ranks

Loss = Callable[[Any, Any, torch.Tensor], torch.Tensor]


def two_towers(first: Any, second: Any, x: torch.Tensor) -> torch.Tensor:
    """Encode on both sides and compare, as of text and images."""
    return (first(x) * second(x * 2)).sum()


def one_after_the_other(first: Any, second: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = first(x)
    return second(torch.cat([hidden, hidden[:, :1]], 1)).square().sum()


def again_and_again(first: Any, second: Any, x: torch.Tensor) -> torch.Tensor:
    loss = two_towers(first, second, x)
    return loss + one_after_the_other(second, first, x * 3)


SHORT = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "wait_for_reduce_scatter": "finish",
}
LOSSES = [two_towers, one_after_the_other, again_and_again]


def train(loss_of: Loss, shares: bool, when: int, is_last: bool) -> list[list[str]]:
    torch.manual_seed(0)
    references = [Net(2), Net(2)]
    models = [shard_net(copy.deepcopy(one)) for one in references]
    optimizers = [
        torch.optim.SGD([p for one in pair for p in one.parameters()], lr=0.05)
        for pair in (models, references)
    ]
    parts = []
    for step in range(4):
        if shares and step == when:
            share_comm_ctx(models)
        for model in models:
            model.set_is_last_backward(is_last or step % 2 == 1)
        with both_traced(models) as events:
            loss = loss_of(*models, own_input(step))
            loss.backward()
        expected = loss_of(*references, own_input(step))
        expected.backward()
        torch.testing.assert_close(loss, expected)
        parts.append(events)
        if not is_last and step % 2 == 0:
            continue
        for model, reference in zip(models, references, strict=True):
            average_gradients(reference.parameters())
            if loss_of is two_towers and is_last:
                assert_parity(model, reference)
            model.reshard()
            for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                assert param.grad.placements == param.placements
                torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model, reference in zip(models, references, strict=True):
            state = {name: value.full_tensor() for name, value in model.state_dict().items()}
            reference.load_state_dict(state)
    return parts


@contextlib.contextmanager
def both_traced(models: list[Any]) -> Iterator[list[str]]:
    events: list[str] = []

    def hear(mark: str, event: str, group: Any) -> None:
        if event in SHORT:
            events.append(f"{SHORT[event]} {mark}{group.name.removeprefix('blocks.') or 'root'}")

    first, second = ([model._group()] for model in models)
    with listening(first, partial(hear, "a")), listening(second, partial(hear, "b")):
        yield events


def events_on_ranks(loss_of: Loss, shares: bool, when: int, is_last: bool) -> list[list[str]]:
    first, second = run_ranks(train, 2, loss_of, shares, when, is_last)
    assert first == second
    return first


@pytest.mark.brief(1)
@pytest.mark.parametrize("is_last", [True, False], ids=["", "left open"])
@pytest.mark.parametrize("shares", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_two_roots_train_as_unsharded(loss_of: Loss, shares: bool, is_last: bool) -> None:
    """Exact, with the same order of collectives on all ranks, before or after first forwards."""
    for when in (0, 2) if shares else (0,):
        for step, events in enumerate(events_on_ranks(loss_of, shares, when, is_last)):
            reductions = [event for event in events if event.startswith("reduce")]
            assert len(reductions) == len(set(reductions)) == 6
            if shares and step >= when:
                assert most_in_flight(events) == 1


def most_in_flight(events: list[str]) -> int:
    most = now = 0
    for event in events:
        now = max(0, now + {"reduce": 1, "finish": -1}.get(event.split()[0], 0))
        most = max(most, now)
    return most


def test_share_comm_ctx_takes_sharded_modules() -> None:
    with fake_ranks(2):
        share_comm_ctx([])
        one = fully_shard(nn.Linear(4, 4))
        share_comm_ctx([one])
        with pytest.raises(ValueError) as caught:
            share_comm_ctx([one, nn.Linear(4, 4)])
    assert str(caught.value) == "Expected sharded modules, got Linear; apply fully_shard to it"
    assert composable_shard.share_comm_ctx is share_comm_ctx
