"""Saving, loading and streaming weights: safetensors files, full tensors one by one, and shards."""
