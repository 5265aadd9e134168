"""Policies of torch, said in ours.

Classes of torch stay what they are when the drop-in is installed: a policy may have been made, and
the class taken, before. So what ``fully_shard`` is given is translated.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from composable_shard import _torch
from composable_shard.mesh import DataParallelMeshDims, ShardPlacementResult
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

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
