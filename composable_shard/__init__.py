"""Fully sharded data parallelism for PyTorch: per module, composable, in place.

Each public name is imported at its first use. So ``import composable_shard`` takes almost no time,
and ``composable-shard --help`` answers without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names in _MODULES; for type checkers, "X as X" marks a re-export
    from composable_shard.api import fully_shard as fully_shard
    from composable_shard.api import register_fsdp_forward_method as register_fsdp_forward_method
    from composable_shard.api import share_comm_ctx as share_comm_ctx
    from composable_shard.core.transport.collectives import AllGather as AllGather
    from composable_shard.core.transport.collectives import ReduceScatter as ReduceScatter
    from composable_shard.errors import CommunicationError as CommunicationError
    from composable_shard.errors import ExtensionError as ExtensionError
    from composable_shard.errors import MaterializationError as MaterializationError
    from composable_shard.errors import RankMismatchError as RankMismatchError
    from composable_shard.errors import ShardError as ShardError
    from composable_shard.errors import StaleParameterError as StaleParameterError
    from composable_shard.insight.estimate import estimate as estimate
    from composable_shard.insight.explain import explain as explain
    from composable_shard.insight.trace import trace as trace
    from composable_shard.mesh import DataParallelMeshDims as DataParallelMeshDims
    from composable_shard.mesh import ShardPlacementResult as ShardPlacementResult
    from composable_shard.module import FSDPModule as FSDPModule
    from composable_shard.module import GradientReductionHandle as GradientReductionHandle
    from composable_shard.module import UnshardHandle as UnshardHandle
    from composable_shard.policy import CPUOffloadPolicy as CPUOffloadPolicy
    from composable_shard.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from composable_shard.policy import OffloadPolicy as OffloadPolicy
    from composable_shard.policy import Sharding as Sharding
    from composable_shard.policy import WireFormat as WireFormat
    from composable_shard.train.clip import clip_grad_norm_ as clip_grad_norm_
    from composable_shard.train.grad_scaler import ShardedGradScaler as ShardedGradScaler
    from composable_shard.train.init import init_sharded as init_sharded
    from composable_shard.train.init import sync_module_states as sync_module_states
    from composable_shard.train.moving import move as move
    from composable_shard.train.parking import parked as parked
    from composable_shard.train.uneven import sit_out as sit_out
    from composable_shard.train.uneven import uneven as uneven
    from composable_shard.train.unsharded import unsharded as unsharded
    from composable_shard.train.weighing import weigh as weigh
    from composable_shard.train.weights.load import load_sharded as load_sharded
    from composable_shard.train.weights.save import save_full as save_full
    from composable_shard.train.weights.stream import changed_since as changed_since
    from composable_shard.train.weights.stream import iter_full as iter_full
    from composable_shard.train.weights.stream import local_shards as local_shards
    from composable_shard.train.wrap import apply_fully_shard as apply_fully_shard
    from composable_shard.wire import BlockFormat as BlockFormat

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
    "policy": (
        "CPUOffloadPolicy",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "Sharding",
        "WireFormat",
    ),
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
    "wire": ("BlockFormat",),
}
"""The public names, by the module that defines them."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List all names, including public ones that are not imported yet."""
    return sorted({*globals(), *__all__})
