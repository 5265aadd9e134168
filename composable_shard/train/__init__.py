"""What a training loop calls on top of ``fully_shard``."""
