"""Weights out of a model and into it: safetensors files, whole tensors one by one, and shards."""
