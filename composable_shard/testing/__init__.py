"""For tests of sharded models: run functions on ranks, and compare with unsharded training.

`docs/testing.md` shows how. Strategies for hypothesis are in
`composable_shard.testing.strategies`, which is the only part that needs hypothesis.
"""

from composable_shard.testing.programs import (
    STEPS,
    ParamSpec,
    Step,
    Tree,
    TreeLoss,
    TreeSpec,
    shard_tree,
)
from composable_shard.testing.ranks import (
    RankError,
    RankFailure,
    RankTimeout,
    fake_ranks,
    run_on_ranks,
    run_ranks,
    run_threads,
    stop_ranks,
)
from composable_shard.testing.training import assert_trains_like_unsharded, shard_children

__all__ = [
    "STEPS",
    "ParamSpec",
    "RankError",
    "RankFailure",
    "RankTimeout",
    "Step",
    "Tree",
    "TreeLoss",
    "TreeSpec",
    "assert_trains_like_unsharded",
    "fake_ranks",
    "run_on_ranks",
    "run_ranks",
    "run_threads",
    "shard_children",
    "shard_tree",
    "stop_ranks",
]
