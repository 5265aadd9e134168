"""A root of several modules: their calls, one after another, are forwards of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.errors import StaleParameterError
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks


def tower(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


@pytest.mark.parametrize("kept", [None, True, False])
def test_parameters_that_change_before_the_backward_are_refused(kept: bool | None) -> None:
    """On one rank the unsharded parameters are the shards, which a step changes."""
    with fake_ranks(1):
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        fully_shard([first, second], reshard_after_forward=kept)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        second(first(torch.ones(1, 3))).sum().backward()
        out = second(torch.tanh(first(torch.ones(1, 3))))
        optimizer.step()
        with pytest.raises(StaleParameterError):
            out.sum().backward()


@pytest.mark.parametrize("kept", [True, False])
def test_it_is_freed_when_all_have_run(kept: bool) -> None:
    with fake_ranks(2):
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        fully_shard([first, second], reshard_after_forward=kept)
        for _ in range(2):
            with record_events(first, "all_gather", "reshard") as recorded:
                hidden = first(torch.ones(1, 3))
                recorded.append(("between", ""))
                out = second(hidden)
            after = [("reshard", "")] if kept else []
            assert recorded == [("all_gather", ""), ("between", ""), *after]
            out.sum().backward()


def test_without_grad_it_is_freed_when_all_have_run() -> None:
    with fake_ranks(2), torch.no_grad():
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        fully_shard([first, second])
        with record_events(first, "all_gather", "reshard") as recorded:
            second(first(torch.ones(1, 3)))
        assert recorded == [("all_gather", ""), ("reshard", "")]


def test_groups_below_have_names_of_their_own() -> None:
    with fake_ranks(2):
        encoder, decoder = tower(), tower()
        for module in (*encoder, *decoder):
            fully_shard(module)
        fully_shard([encoder, decoder])
        with record_events(encoder, "pre_forward") as recorded:
            decoder(encoder(torch.ones(1, 4)))
    names = ["", "0.0", "0.1", "", "1.0", "1.1"]
    assert [name for _, name in recorded] == names
