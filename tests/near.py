"""Ranks that read each other's memory, and ranks that are kept from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from composable_shard.core.transport import point_to_point
from composable_shard.core.transport.same_host import Neighbour, neighbours
from composable_shard.testing import run_ranks

Result = TypeVar("Result")


@dataclass(frozen=True)
class Apart(Generic[Result]):
    """Calls `fn` on a rank that is kept from reading those at some distance.

    Args:
        fn: What to call.
        steps: The distance in ranks; `None` keeps it from reading any.
    """

    fn: Callable[..., Result]
    steps: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        with mock.patch.object(point_to_point, "neighbours", self._near):
            return self.fn(*args, **kwargs)

    def _near(self, group: dist.ProcessGroup) -> dict[int, Neighbour]:
        rank, count, near = group.rank(), group.size(), neighbours(group)
        if self.steps is None:
            return {}
        apart = {(rank + self.steps) % count, (rank - self.steps) % count}
        return {peer: near[peer] for peer in near if peer not in apart}


def processes() -> dict[int, int]:
    assert dist.group.WORLD is not None
    return {rank: one.process for rank, one in neighbours(dist.group.WORLD).items()}


@pytest.fixture(scope="session")
def readable() -> None:
    """Skip where processes may not read each other."""
    if run_ranks(processes, 2) == [{}, {}]:
        pytest.skip("the system does not let a process read another one")
