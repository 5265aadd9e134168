"""What takes the place of torch's functions and policies.

Classes of torch stay what they are when the drop-in is installed: a policy may have been made, and
the class taken, before. So what ``fully_shard`` is given is translated.

Modules that torch's ``fully_shard`` was applied to before keep working: what concerns them goes to
torch's functions. Ours are imported when they are called, since the drop-in may be installed in the
middle of importing this package, which itself imports from torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composable_shard import _torch
from composable_shard.mesh import DataParallelMeshDims, ShardPlacementResult
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

# Policies of torch, said in ours ------------------------------------------------------------------

_OURS = {
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "OffloadPolicy": OffloadPolicy,
    "DataParallelMeshDims": DataParallelMeshDims,
}  # a class before those that it is derived from


class _EarlierPolicy(MixedPrecisionPolicy):
    """One of a torch below 2.15, where ``param_dtype`` decides the dtype of gradients, too."""

    rounds_gradients = True


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call of ``fully_shard`` with ours in the place of torch's."""
    ours = {name: _translated_value(value) for name, value in options.items()}
    place = ours.get("shard_placement_fn")
    if callable(place):
        ours["shard_placement_fn"] = _translated_function(place)
    return ours


def _translated_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _translated_value(member) for name, member in value.items()}
    torch_fsdp = importlib.import_module("torch.distributed.fsdp")
    for name, ours in _OURS.items():
        theirs = getattr(torch_fsdp, name, None)  # torch has not had all of them always
        if theirs is not None and isinstance(value, theirs):
            names = [field.name for field in dataclasses.fields(theirs)]
            fields = {name: getattr(value, name) for name in names}
            if ours is MixedPrecisionPolicy and not _torch.REDUCES_IN_GRAD_DTYPE:
                fields["reduce_dtype"] = fields["reduce_dtype"] or fields["param_dtype"]
                return _EarlierPolicy(**fields)
            return ours(**fields)
    return value


def _translated_function(place: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a ``shard_placement_fn`` that may return the placement result of torch."""

    @functools.wraps(place)
    def place_ours(param: Any) -> Any:
        result = place(param)
        mesh_of_torch = getattr(result, "mesh_info", None)
        if mesh_of_torch is None:
            return result
        return ShardPlacementResult(result.placement, mesh_of_torch.mesh)

    return place_ours


# What takes the place of torch's functions --------------------------------------------------------

_torch_fsdp = importlib.import_module("torch.distributed.fsdp")
_NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
OF_TORCH: dict[str, Callable[..., Any]] = {
    name: getattr(_torch_fsdp, name) for name in _NAMES if hasattr(_torch_fsdp, name)
}  # torch has not had all of them always


# Signature and docstring are torch's, the name is that of the function here: it can be pickled.
@functools.wraps(OF_TORCH["fully_shard"], assigned=("__doc__",), updated=())
def fully_shard(module: Any, **options: Any) -> Any:
    """Shard a module by ours."""
    from composable_shard import api

    return api.fully_shard(module, **translated(options))


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let another method of a module be called as its forward is, by whose module it is."""
    from composable_shard import api

    if _is_of_torch(module):
        OF_TORCH["register_fsdp_forward_method"](module, method_name)
    else:
        api.register_fsdp_forward_method(module, method_name)


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let roots bound their memory for reductions together, or share streams if torch's."""
    from composable_shard import api

    if any(map(_is_of_torch, modules)):
        OF_TORCH["share_comm_ctx"](modules)
    else:
        api.share_comm_ctx(modules)


# Pipeline schedules ask the function for the state of a module.
fully_shard.state = OF_TORCH["fully_shard"].state  # type: ignore[attr-defined]

OURS: dict[str, Callable[..., Any]] = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}


def _is_of_torch(module: Any) -> bool:
    """Tell whether torch's ``fully_shard`` was applied to a module."""
    from composable_shard.module import FSDPModule

    return isinstance(module, _torch_fsdp.FSDPModule) and not isinstance(module, FSDPModule)
