"""Interfaces of other libraries, on top of ``fully_shard``."""
