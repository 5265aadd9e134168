"""For tests of sharded models: run a function on several ranks."""

from composable_shard.testing.ranks import (
    RankError,
    RankFailure,
    RankTimeout,
    fake_ranks,
    run_ranks,
    run_threads,
    stop_ranks,
)

__all__ = [
    "RankError",
    "RankFailure",
    "RankTimeout",
    "fake_ranks",
    "run_ranks",
    "run_threads",
    "stop_ranks",
]
