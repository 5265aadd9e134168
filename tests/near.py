"""Ranks that share memory, and ranks that are kept from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from composable_shard.core.transport.gloo import point_to_point
from composable_shard.core.transport.gloo.mailbox import local_ranks, why_not_shared
from composable_shard.testing import run_ranks

Result = TypeVar("Result")


@dataclass(frozen=True)
class Apart(Generic[Result]):
    """Calls `fn` on a rank that shares no memory with ranks `steps` away, or with any rank."""

    fn: Callable[..., Result]
    steps: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        with kept_apart(self.steps):
            return self.fn(*args, **kwargs)


@contextlib.contextmanager
def kept_apart(steps: int | None = None) -> Iterator[None]:
    """Keep a rank from the memory of those at some distance, or of all."""

    def near(group: dist.ProcessGroup) -> list[int]:
        rank, count = group.rank(), group.size()
        if steps is None:
            return []
        apart = {(rank + steps) % count, (rank - steps) % count}
        return [peer for peer in local_ranks(group) if peer not in apart]

    with mock.patch.object(point_to_point, "local_ranks", near):
        yield


def reasons() -> dict[int, str]:
    assert dist.group.WORLD is not None
    return why_not_shared(dist.group.WORLD)


@pytest.fixture(scope="session")
def sharing() -> None:
    """Skip where the system lets processes share no memory."""
    said = run_ranks(reasons, 2)
    if said != [{}, {}]:
        pytest.skip(f"ranks share no memory here: {said}")
