"""From a plain module to a sharded one: who takes part, can it be done, then all at once.

Imports group, storage, tree, hooks. Everything that can fail happens before the module is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from composable_shard import _torch
from composable_shard.core_next.group import ParamGroup
from composable_shard.core_next.storage import Bucket, ShardedParam, Slot, Storage
from composable_shard.mesh import ShardMesh, ShardPlacementResult, resolve_mesh
from composable_shard.policy import MixedPrecisionPolicy

ShardPlacementFn = Callable[[nn.Parameter], Shard | DeviceMesh | ShardPlacementResult | None]

_GROUP = "_composable_shard_group"


def group_of(module: nn.Module) -> ParamGroup | None:
    """Return the group of a sharded module."""
    found: ParamGroup | None = module.__dict__.get(_GROUP)
    return found


def set_group(module: nn.Module, group: ParamGroup) -> None:
    """Let a module belong to a group."""
    module.__dict__[_GROUP] = group


def groups_in(modules: Iterable[nn.Module]) -> list[ParamGroup]:
    """Return the groups of all sharded modules in some modules, outer ones first."""
    found = (group_of(child) for module in modules for child in module.modules())
    return list(dict.fromkeys(group for group in found if group is not None))


def top_modules(module: object) -> tuple[nn.Module, ...]:
    """Return the modules of the argument, without those that lie inside another of them.

    Raises:
        TypeError: If it is not a module or a list of modules.
        ValueError: If the list is empty, or a module is a container without a forward.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"Expected module to be an nn.Module or a list of them, got {type(module).__name__}"
        )
    if not modules:
        raise ValueError("Expected at least one module, got an empty list")
    for index, member in enumerate(modules):
        if not isinstance(member, nn.Module):
            raise TypeError(
                f"Expected a list of nn.Module, got {type(member).__name__} at index {index}"
            )
        if type(member).forward is nn.Module.forward and "forward" not in vars(member):
            raise ValueError(
                f"Expected a module with a forward, got the container {type(member).__name__}; "
                "call fully_shard on its children, or on a list of them"
            )
    inner = {id(m) for top in modules for m in top.modules() if m is not top}
    unique = {id(member): member for member in modules if id(member) not in inner}
    return tuple(unique.values())


class Managed(NamedTuple):
    """The parameters that one ``fully_shard`` call shards.

    Attributes:
        modules: All modules below the top modules, except those of inner groups.
        slots: Each parameter with the modules and names that hold it.
        names: The qualified name of each parameter.
    """

    modules: tuple[nn.Module, ...]
    slots: Mapping[nn.Parameter, Sequence[Slot]]
    names: Mapping[nn.Parameter, str]


def find_managed(modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> Managed:
    """Collect the parameters above all inner modules that are sharded or replicated."""
    ignored_ids = {id(param) for param in ignored}
    visited: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if module in visited:
            return
        visited[module] = prefix
        for name, child in module.named_children():
            if _torch.is_replicated(child):
                ignored_ids.update(map(id, child.parameters()))
            elif group_of(child) is None:
                visit(child, f"{prefix}{name}.")

    for top in modules:
        visit(top, "")
    slots: dict[nn.Parameter, list[Slot]] = {}
    names: dict[nn.Parameter, str] = {}
    for module, prefix in visited.items():
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored_ids:
                slots.setdefault(param, []).append(Slot.of(module, name))
                names.setdefault(param, f"{prefix}{name}")
    return Managed(tuple(visited), slots, names)


def plan_params(
    managed: Managed,
    mesh: ShardMesh,
    shard_placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
) -> list[ShardedParam]:
    """Decide how each parameter is cut, over which mesh, in which dtypes.

    Raises:
        ValueError: For a parameter that cannot be sharded as asked, with its name.
    """
    meshes: dict[DeviceMesh, ShardMesh] = {}
    planned = []
    for param, slots in managed.slots.items():
        name = managed.names[param]
        placement, own_mesh = _placement_of(name, param, shard_placement_fn)
        over = mesh
        if own_mesh is not None:
            if own_mesh not in meshes:
                meshes[own_mesh] = _own_mesh(name, own_mesh)
            over = meshes[own_mesh]
        if param.device.type not in ("meta", "cpu", over.device.type):
            raise ValueError(
                f"Expected parameter '{name}' on {over.device}, on the CPU or on the meta device, "
                f"got {param.device}"
            )
        dim = _shard_dim(name, param, placement)
        dtypes = policy.for_parameter(name, param)
        planned.append(ShardedParam(name, slots, param, dim, over, dtypes))
    return planned


def _placement_of(
    name: str, param: nn.Parameter, shard_placement_fn: ShardPlacementFn | None
) -> tuple[Shard | None, DeviceMesh | None]:
    """Return how users want a parameter cut, and over which mesh of its own."""
    asked: object = None
    if shard_placement_fn is not None:
        try:
            asked = shard_placement_fn(param)
        except Exception as error:
            error.add_note(f"raised by shard_placement_fn for parameter '{name}'")
            raise
    if isinstance(asked, ShardPlacementResult):
        placement, mesh = asked.placement, asked.mesh
        if (placement is None or isinstance(placement, Shard)) and (
            mesh is None or isinstance(mesh, DeviceMesh)
        ):
            return placement, mesh
    if isinstance(asked, DeviceMesh):
        return None, asked
    if asked is None or isinstance(asked, Shard):
        return asked, None
    raise ValueError(
        "Expected shard_placement_fn to return Shard, a DeviceMesh, ShardPlacementResult or None "
        f"for parameter '{name}', got {type(asked).__name__}: {asked!r}"
    )


def _own_mesh(name: str, mesh: DeviceMesh) -> ShardMesh:
    try:
        return resolve_mesh(mesh)
    except ValueError as error:
        raise ValueError(f"{error}, from shard_placement_fn for parameter '{name}'") from error


def _shard_dim(name: str, param: nn.Parameter, placement: Shard | None) -> int | None:
    """Return the dim to shard; ``None`` for a scalar."""
    if placement is None:
        return 0 if param.ndim else None
    if not -param.ndim <= placement.dim < param.ndim:
        raise ValueError(
            f"Expected shard_placement_fn to return a dim within the {param.ndim} dims of "
            f"parameter '{name}', got {placement}"
        )
    return placement.dim % param.ndim


@torch.no_grad()
def build_group(
    modules: tuple[nn.Module, ...],
    params: Sequence[ShardedParam],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
) -> ParamGroup:
    """Copy this rank's shards into buckets; touches no module."""
    kinds: dict[tuple[ShardMesh, torch.dtype, torch.dtype, torch.device], list[ShardedParam]] = {}
    for param in params:
        device = param.original.device
        device = device if device.type == "meta" else param.mesh.device
        key = param.mesh, param.dtype, param.compute_dtype, device
        kinds.setdefault(key, []).append(param)
    with torch.inference_mode(False):
        buckets: list[Storage] = [Bucket(same, key[-1]) for key, same in kinds.items()]
    return ParamGroup(modules, buckets, mesh, policy.without_override())


def commit(group: ParamGroup, managed: Managed) -> None:
    """Register the sharded parameters and move buffers to the device of compute."""
    for param in group.params:
        for slot in param.slots:
            slot.module._parameters[slot.name] = param.sharded
    device = group.mesh.device
    for module in managed.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)
