"""What every test needs: one thread, the same random state, and no process left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from composable_shard.testing import stop_ranks

# These are programs: they import each other by name, and ranks import them from there too.
for folder in ("benchmarks", "examples"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    # Ranks are processes of one thread each; so is the process that compares with them.
    torch.set_num_threads(1)
    yield
    stop_ranks()


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    torch.manual_seed(0)
