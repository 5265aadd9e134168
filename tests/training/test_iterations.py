"""The short form of ``tests/long``: nothing is left behind by 40 iterations of random programs."""

from __future__ import annotations

from composable_shard.testing import run_on_ranks
from training.iterations import iterate


def test_forty_iterations_train_exactly_and_leave_nothing_behind() -> None:
    for found, (before, after) in run_on_ranks(iterate, 2, 40, (20, 40), timeout=120):
        assert found == []
        assert after.open_files == before.open_files
        assert after.process_groups == before.process_groups
        assert after.own_objects == before.own_objects
        assert after.tensors == before.tensors
