"""From a plain module to a sharded one: who takes part, is it allowed, then all at once.

Everything that can fail happens before the module is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from composable_shard import _torch
from composable_shard.core.codec import agree_on_shards, cut_shard, needs_extension
from composable_shard.core.group import ParamGroup
from composable_shard.core.not_sharded import is_taken
from composable_shard.core.param import Attributes, ShardedParam, Slot
from composable_shard.core.ties import Managed, owner_of_sharded, remember
from composable_shard.core.transport.host import Offload, check_names, offload_of
from composable_shard.core.units import build_units
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh, ShardPlacementFn, own_mesh_of, placement_of, shard_dim
from composable_shard.policy import MixedPrecisionPolicy


def find_managed(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    planned: Collection[nn.Module] = (),
) -> Managed:
    """Walk down to nested modules that are sharded or replicated; collect what lies above them.

    A parameter that is tied to one of a replicated module is replicated, too.

    Args:
        modules: The top modules.
        ignored: Parameters to leave alone.
        planned: Modules that will be sharded before.
    """
    ignored_ids = {id(param) for param in ignored}
    visited: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in visited:
            return
        visited[module] = name
        for child_name, child in module.named_children():
            if _torch.is_replicated(child):
                ignored_ids.update(map(id, child.parameters()))
            elif not is_taken(child) and child not in planned:
                visit(child, f"{name}{child_name}.")

    for top in modules:
        visit(top, "")
    slots: dict[nn.Parameter, list[Slot]] = {}
    names: dict[nn.Parameter, str] = {}
    for module, prefix in visited.items():
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in ignored_ids:
                slots.setdefault(param, []).append(Slot.of(module, attribute))
                names.setdefault(param, f"{prefix}{attribute}")
    return Managed(tuple(visited), {param: tuple(places) for param, places in slots.items()}, names)


def plan_params(
    managed: Managed,
    mesh: ShardMesh,
    shard_placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    offload: Offload = None,
) -> list[ShardedParam]:
    """Decide how each parameter is cut, over which mesh, in which dtypes; check that all can be.

    Raises:
        ValueError: For a parameter that cannot be sharded as asked, with its name.
    """
    check_names(offload, set(managed.names.values()))
    meshes: dict[DeviceMesh, ShardMesh] = {}
    planned = []
    for param, slots in managed.params.items():
        name = managed.names[param]
        if is_lazy(param):
            raise ValueError(
                f"Expected parameter '{name}' of {type(slots[0].module).__name__} to have a shape, "
                "got an uninitialized one; run a forward of the model before fully_shard"
            )
        placement, own_mesh = placement_of(name, param, shard_placement_fn)
        over = mesh
        if own_mesh is not None:
            if own_mesh not in meshes:
                meshes[own_mesh] = own_mesh_of(name, own_mesh)
            over = meshes[own_mesh]
        _check_param(name, param, over)
        dim = shard_dim(name, param, placement)
        dtypes = policy.for_parameter(name, param)
        planned.append(
            ShardedParam(name, slots, param, dim, over, dtypes, offload_of(name, offload))
        )
    return planned


def _check_param(name: str, param: nn.Parameter, mesh: ShardMesh) -> None:
    owner = owner_of_sharded(param)
    if owner is not None:
        raise ValueError(
            f"Expected parameter '{name}' to be sharded by one fully_shard call, got the sharded "
            f"parameter '{owner.name}' of another group; shard inner modules before outer ones, "
            "tie parameters before either, and where a sharded base was wrapped shard the new "
            "adapters alone"
        )
    if param.device.type not in ("meta", "cpu", mesh.device.type):
        raise ValueError(
            f"Expected parameter '{name}' on {mesh.device}, on the CPU or on the meta device, "
            f"got {param.device}"
        )


@torch.no_grad()
def build_group(
    modules: tuple[nn.Module, ...],
    managed: Managed,
    planned: list[ShardedParam],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
) -> ParamGroup:
    """Copy this rank's shards into buckets and make the sharded parameters; touches no module."""
    originals = list(managed.params)
    shards = _own_shards(planned, originals)
    with torch.inference_mode(False):
        units, locals_ = build_units(planned, shards)
        for param, local, original in zip(planned, locals_, originals, strict=True):
            param.create_sharded(local, original)
    return ParamGroup(modules, planned, units, mesh, policy.without_override())


def _own_shards(
    planned: Sequence[ShardedParam], originals: Sequence[nn.Parameter]
) -> list[torch.Tensor]:
    """Cut this rank's shards; those of tensor subclasses are copies.

    Collective: one small object for each mesh axis if there are tensor subclasses, else none.
    """
    shards: list[torch.Tensor] = []
    meshes: dict[DeviceMesh, None] = {}
    failure = None
    for param, original in zip(planned, originals, strict=True):
        whole = param.model_part(original)
        if not needs_extension(whole):
            shard = param.shard_of(original)
            shards.append(shard if shard.device.type == "meta" else shard.to(param.device))
            continue
        meshes[param.placement.mesh] = None
        try:
            place = param.form, param.mesh.shard_rank, param.device
            shards.append(cut_shard(param.name, whole, *place, param.policy))
        except ExtensionError as error:
            failure = failure or error
    if meshes:
        agree_on_shards(failure, list(meshes))
    return shards


def check_subclasses(planned: Sequence[ShardedParam], managed: Managed) -> None:
    """Raise what :func:`build_group` raises, on all ranks; keep nothing.

    Collective: see build_group.
    """
    pairs = zip(planned, managed.params, strict=True)
    cut = [(p, original) for p, original in pairs if needs_extension(p.model_part(original))]
    _own_shards([param for param, _ in cut], [original for _, original in cut])


def commit(group: ParamGroup, managed: Managed) -> None:
    """Register the sharded parameters and move buffers to the device of compute."""
    for param, original in zip(group.params, managed.params, strict=True):
        param.register_sharded()
        Attributes(param.sharded, original)  # it may be given back, and be sharded again
        remember(original, param.slots, group, param)
    device = group.mesh.device
    for module in managed.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)
