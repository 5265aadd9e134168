"""What a training loop calls on top of sharded modules."""
