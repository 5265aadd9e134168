"""Explaining, estimating and recording the steps of sharded modules."""
