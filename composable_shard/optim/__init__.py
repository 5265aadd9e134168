"""Stock optimizers on shards: steps on flat buffers."""

from composable_shard.optim.flat import flat

__all__ = ["flat"]
