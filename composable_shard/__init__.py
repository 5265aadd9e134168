"""Fully sharded data parallelism for PyTorch: per module, composable, in place.

A public name is imported when it is first asked for. So ``import composable_shard`` costs nothing
beside ``import torch``, and the command line answers before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from composable_shard.train.init import init_sharded, sync_module_states
    from composable_shard.train.moving import move
    from composable_shard.train.parking import parked
    from composable_shard.train.uneven import sit_out, uneven
    from composable_shard.train.unsharded import unsharded
    from composable_shard.train.weighing import weigh
    from composable_shard.train.weights.load import load_sharded
    from composable_shard.train.weights.save import save_full
    from composable_shard.train.weights.stream import changed_since, iter_full, local_shards
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
    "changed_since",
    "clip_grad_norm_",
    "estimate",
    "explain",
    "fully_shard",
    "init_sharded",
    "iter_full",
    "load_sharded",
    "local_shards",
    "move",
    "parked",
    "register_fsdp_forward_method",
    "save_full",
    "share_comm_ctx",
    "sit_out",
    "sync_module_states",
    "trace",
    "uneven",
    "unsharded",
    "weigh",
]

_MODULES = {
    "api": ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
    "core.transport.collectives": ("AllGather", "ReduceScatter"),
    "errors": (
        "CommunicationError",
        "ExtensionError",
        "MaterializationError",
        "RankMismatchError",
        "ShardError",
        "StaleParameterError",
    ),
    "insight.estimate": ("estimate",),
    "insight.explain": ("explain",),
    "insight.trace": ("trace",),
    "mesh": ("DataParallelMeshDims", "ShardPlacementResult"),
    "module": ("FSDPModule", "GradientReductionHandle", "UnshardHandle"),
    "policy": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"),
    "train.clip": ("clip_grad_norm_",),
    "train.grad_scaler": ("ShardedGradScaler",),
    "train.init": ("init_sharded", "sync_module_states"),
    "train.moving": ("move",),
    "train.parking": ("parked",),
    "train.uneven": ("sit_out", "uneven"),
    "train.unsharded": ("unsharded",),
    "train.weighing": ("weigh",),
    "train.weights.load": ("load_sharded",),
    "train.weights.save": ("save_full",),
    "train.weights.stream": ("changed_since", "iter_full", "local_shards"),
    "train.wrap": ("apply_fully_shard",),
}
"""Where each public name is defined; for type checkers, the imports above say the same."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names too, also those not yet imported."""
    return sorted({*globals(), *__all__})
