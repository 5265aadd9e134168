"""What fails on a device: nothing goes back to a stream while something else uses it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.simulated_device import SimulatedDevice

from composable_shard.core.transport.channel import Channel
from composable_shard.testing import fake_ranks
from streams.models import LOW, NUM_BLOCKS, WIDTH, Training


class _PlannedError(RuntimeError):
    """What a launch raises."""


def failing_at(number: int) -> Any:
    """Let the launch of an all-reduce fail."""
    real, numbers = Channel.all_reduce, iter(range(number, -1, -1))

    def all_reduce(self: Channel, tensor: torch.Tensor, *, average: bool) -> Any:
        if not next(numbers, None):
            raise _PlannedError
        return real(self, tensor, average=average)

    return mock.patch.object(Channel, "all_reduce", all_reduce)


@pytest.mark.parametrize("number", range(NUM_BLOCKS))
@pytest.mark.parametrize("options", [{}, {"mp_policy": LOW}], ids=["fp32", "bf16"])
def test_memory_of_a_failed_launch_goes_back_when_nothing_uses_it(
    number: int, options: dict[str, Any]
) -> None:
    with fake_ranks(4), SimulatedDevice() as device:
        model = Training(replicas=2, options=options).model()
        x = torch.ones(3, WIDTH)
        model(x).sum().backward()
        with failing_at(number), pytest.raises(_PlannedError):
            model(x).sum().backward()
        torch.ones(3)  # allocates what has been freed
        model.reset_iter_state()
        model(x).sum().backward()
    assert device.faults == []
