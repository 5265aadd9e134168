"""Sharded modules under torch.compile."""
