"""Two thousand iterations of random programs: exact to the end, and nothing grows."""

from __future__ import annotations

import pytest
from training.iterations import iterate

from composable_shard.testing import run_on_ranks, stop_ranks

MEASURES = (400, 800, 1200, 1600, 2000)


@pytest.mark.timeout(3000)
def test_two_thousand_iterations_train_exactly_and_leave_nothing_behind() -> None:
    stop_ranks()  # what earlier calls have left in the processes is none of this
    for found, seen in run_on_ranks(iterate, 2, 2000, MEASURES, timeout=2700):
        assert found == []
        for name in ("open_files", "process_groups", "own_objects", "tensors"):
            assert len({getattr(one, name) for one in seen}) == 1, (name, seen)
        growth = seen[-1].resident_nbytes - seen[0].resident_nbytes
        assert growth < 4 * 2**20, seen
