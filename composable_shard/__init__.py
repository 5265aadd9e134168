"""Fully sharded data parallelism for PyTorch: per module, composable, in place."""

from composable_shard.api import fully_shard
from composable_shard.core.custom import AllGather, ReduceScatter
from composable_shard.errors import (
    ExtensionError,
    MaterializationError,
    RankMismatchError,
    ShardError,
    StaleParameterError,
)
from composable_shard.mesh import DataParallelMeshDims, ShardPlacementResult
from composable_shard.module import FSDPModule, UnshardHandle
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "ExtensionError",
    "FSDPModule",
    "MaterializationError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RankMismatchError",
    "ReduceScatter",
    "ShardError",
    "ShardPlacementResult",
    "StaleParameterError",
    "UnshardHandle",
    "fully_shard",
]
