"""What sharding does to a model, as the buckets and reductions of its groups plan it."""
