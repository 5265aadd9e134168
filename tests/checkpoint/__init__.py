"""Checkpoints: state dicts, plain and distributed, of sharded models and their optimizers."""
