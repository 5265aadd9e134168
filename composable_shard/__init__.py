"""Fully sharded data parallelism for PyTorch: per module, composable, in place."""

from composable_shard.api import fully_shard
from composable_shard.errors import (
    ExtensionError,
    MaterializationError,
    RankMismatchError,
    ShardError,
    StaleParameterError,
)
from composable_shard.module import FSDPModule, UnshardHandle
from composable_shard.policy import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "ExtensionError",
    "FSDPModule",
    "MaterializationError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RankMismatchError",
    "ShardError",
    "StaleParameterError",
    "UnshardHandle",
    "fully_shard",
]
