"""Stock optimizers on sharded parameters."""

from composable_shard.optim.layouts import Owned, Rows, Sharded, with_layout

__all__ = ["Owned", "Rows", "Sharded", "with_layout"]
