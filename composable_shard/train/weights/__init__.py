"""Weights in safetensors files, as one file or as a folder: read into shards and written back."""
