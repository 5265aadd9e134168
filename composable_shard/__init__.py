"""Fully sharded data parallelism for PyTorch: per module, composable, in place."""

from composable_shard.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from composable_shard.core.transport.collectives import AllGather, ReduceScatter
from composable_shard.errors import (
    CommunicationError,
    ExtensionError,
    MaterializationError,
    RankMismatchError,
    ShardError,
    StaleParameterError,
)
from composable_shard.insight.estimate import estimate
from composable_shard.insight.explain import explain
from composable_shard.insight.trace import trace
from composable_shard.mesh import DataParallelMeshDims, ShardPlacementResult
from composable_shard.module import FSDPModule, GradientReductionHandle, UnshardHandle
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from composable_shard.train.clip import clip_grad_norm_
from composable_shard.train.grad_scaler import ShardedGradScaler
from composable_shard.train.synchronize import sync_module_states
from composable_shard.train.unsharded import unsharded
from composable_shard.train.weights.load import load_sharded
from composable_shard.train.weights.save import save_full
from composable_shard.train.wrap import apply_fully_shard

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExtensionError",
    "FSDPModule",
    "GradientReductionHandle",
    "MaterializationError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RankMismatchError",
    "ReduceScatter",
    "ShardError",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "StaleParameterError",
    "UnshardHandle",
    "apply_fully_shard",
    "clip_grad_norm_",
    "estimate",
    "explain",
    "fully_shard",
    "load_sharded",
    "register_fsdp_forward_method",
    "save_full",
    "share_comm_ctx",
    "sync_module_states",
    "trace",
    "unsharded",
]
