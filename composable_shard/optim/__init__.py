"""Stock optimizers on sharded parameters: steps of flat buffers, and of whole matrices."""

from composable_shard.optim.flat import flat
from composable_shard.optim.layouts import Owned, Rows, Sharded, with_layout

__all__ = ["Owned", "Rows", "Sharded", "flat", "with_layout"]
