"""Functions for training loops, on top of ``fully_shard``."""
