"""Ranks that read each other's memory, whatever the size of what they exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from composable_shard.core.comms import direct
from composable_shard.core.comms.near_memory import near_ranks
from composable_shard.testing import run_ranks

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reading(Generic[Result]):
    """Calls `fn` on a rank that reads even the smallest tensor out of the memory of its owner.

    Args:
        fn: What to call.
        far_steps: Ranks at this distance are kept from reading each other.
    """

    fn: Callable[..., Result]
    far_steps: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        def near(group: dist.ProcessGroup) -> dict[int, int]:
            count = group.size()
            return {
                peer: process
                for peer, process in near_ranks(group).items()
                if self.far_steps
                not in ((peer - group.rank()) % count, (group.rank() - peer) % count)
            }

        with mock.patch.multiple(direct, WORTH_READING=0, near_ranks=near):
            return self.fn(*args, **kwargs)


def processes() -> dict[int, int]:
    assert dist.group.WORLD is not None
    return near_ranks(dist.group.WORLD)


@pytest.fixture(scope="session")
def readable() -> None:
    """Skip where processes may not read each other."""
    if run_ranks(processes, 2) == [{}, {}]:
        pytest.skip("the system does not let a process read another one")
