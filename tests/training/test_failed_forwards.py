"""A forward that fails, or that looks as if it had, leaves what others have left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import Net, own_input, shard_net
from order.recording import recorded_iterations, short
from torch import nn

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks


def after_a_failure(fails: bool) -> tuple[list[str], list[torch.Tensor]]:
    """Run a forward, another one that fails in the last block, and the backward of the first."""
    torch.manual_seed(0)
    model = shard_net(Net(3))
    recorded_iterations(model, 1)
    model.zero_grad()
    loss = model(own_input()).square().sum()

    def fail(*_: object) -> None:
        raise ValueError("a bad sample")

    if fails:
        handle = model.blocks[2].register_forward_pre_hook(fail, prepend=True)
        with pytest.raises(ValueError, match="a bad sample"):
            model(own_input(9))
        handle.remove()
    with record_events(model) as recorded:
        loss.backward()
    return short(recorded), [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]


def test_a_backward_goes_as_planned_after_another_forward_has_failed() -> None:
    whole, failed = (run_ranks(after_a_failure, 2, fails, timeout=60)[0] for fails in (False, True))
    # The root was freed with all others, and is gathered again.
    expected = list(whole[0])
    place = expected.index("pre_backward root") + 1
    expected.insert(place, "gather root")
    expected.insert(place + 2, "wait root")  # behind the launch of the next one
    assert failed[0] == expected
    assert all(map(torch.equal, failed[1], whole[1]))


class TrainsItself(nn.Module):
    """Runs a backward within its forward, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> None:
        self.layer(x).square().sum().backward()


def test_a_forward_without_output_is_no_failure_where_an_error_is_handled() -> None:
    with fake_ranks(1):
        plain = TrainsItself()
        model = copy.deepcopy(plain)
        fully_shard(model.layer)
        fully_shard(model)
        x = torch.ones(2, 3)
        for _ in range(2):
            plain(x)
            try:
                raise ValueError("somewhere else")
            except ValueError:
                model(x)
        got = model.layer.weight.grad
        assert got is not None
        torch.testing.assert_close(got.full_tensor(), plain.layer.weight.grad)  # type: ignore[attr-defined]
