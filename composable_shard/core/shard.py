"""From a plain module to a sharded one: who takes part, can it be done, then all at once.

Imports group, storage, ties, features. Everything that can fail happens before the module is
touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from composable_shard import _torch
from composable_shard.core.codec import agree_on_shards, cut_shard, needs_extension
from composable_shard.core.features.extension import ExtensionBucket, gather_unknown
from composable_shard.core.group import BucketFactory, ParamGroup
from composable_shard.core.not_sharded import is_taken
from composable_shard.core.storage import Bucket, ShardedParam, Slot, Storage
from composable_shard.core.ties import Managed, owner_of_sharded, remember
from composable_shard.core.transport.channel import Channel
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh, ShardPlacementFn, own_mesh_of, placement_of, shard_dim
from composable_shard.policy import MixedPrecisionPolicy, Offload, check_names, offload_of


def find_managed(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    planned: Collection[nn.Module] = (),
) -> Managed:
    """Collect the parameters above all inner modules that are sharded or replicated.

    A parameter that is tied to one of a replicated module is replicated, too.

    Args:
        modules: The top modules.
        ignored: Parameters to leave alone.
        planned: Modules that will be sharded before.
    """
    ignored_ids = {id(param) for param in ignored}
    visited: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if module in visited:
            return
        visited[module] = prefix
        for name, child in module.named_children():
            if _torch.is_replicated(child):
                ignored_ids.update(map(id, child.parameters()))
            elif not is_taken(child) and child not in planned:
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
    return Managed(tuple(visited), {param: tuple(places) for param, places in slots.items()}, names)


def plan_params(
    managed: Managed,
    mesh: ShardMesh,
    shard_placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    offload: Offload = None,
) -> list[ShardedParam]:
    """Decide how each parameter is cut, over which mesh, in which dtypes.

    Raises:
        ValueError: For a parameter that cannot be sharded as asked, with its name.
    """
    check_names(offload, set(managed.names.values()))
    meshes: dict[DeviceMesh, ShardMesh] = {}
    planned = []
    for param, slots in managed.slots.items():
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
        how = offload_of(name, offload)
        planned.append(ShardedParam(name, slots, param, dim, over, dtypes, how))
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


def build_group(
    modules: tuple[nn.Module, ...],
    managed: Managed,
    planned: Sequence[ShardedParam],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
) -> ParamGroup:
    """Copy this rank's shards into buckets and make the sharded parameters; touches no module.

    Collective: for tensor subclasses, one small object for each mesh axis.
    """
    originals = dict(zip(planned, managed.slots, strict=True))
    with torch.no_grad():
        shards = _own_shards(planned, list(managed.slots))
    group: ParamGroup = object.__new__(ParamGroup)
    init_group(group, modules, planned, shards, mesh, policy, originals)
    return group


@torch.no_grad()
def init_group(
    group: ParamGroup,
    modules: tuple[nn.Module, ...],
    params: Sequence[ShardedParam],
    shards: Sequence[torch.Tensor],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
    originals: Mapping[ShardedParam, nn.Parameter] | None = None,
) -> None:
    """Initialize an empty group; copy shards into buckets, where they are from then on.

    With ``originals``, the sharded parameters are made too.
    """
    with torch.inference_mode(False):
        buckets = build_buckets(params, shards)
        for bucket in buckets:
            for param, local in zip(bucket.params, bucket.locals, strict=True):
                if originals is None:
                    param.hold(local)
                else:  # around the place in the bucket: a DTensor keeps the storage offset
                    param.create_sharded(local, originals[param])
    factory = BucketFactory(build_buckets, are_of_kind, create_unsharded)
    group.__init__(modules, buckets, factory, mesh, policy.without_override())  # type: ignore[misc]
    group.params = list(params)  # in the order of the modules, and not of the buckets


def build_buckets(params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> list[Storage]:
    """Copy shards into buckets: one for each mesh, dtype and device, and one for each subclass.

    Args:
        params: The parameters.
        shards: This rank's shard of each.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, (param, shard) in enumerate(zip(params, shards, strict=True)):
        dtypes = shard.dtype, param.policy.compute_dtype(shard.dtype)
        own = index if needs_extension(shard) else None
        kinds.setdefault((param.mesh, *dtypes, shard.device, own), []).append(index)
    buckets: list[Storage] = []
    for indices in kinds.values():
        some = [params[index] for index in indices], [shards[index] for index in indices]
        if needs_extension(some[1][0]):
            buckets.append(ExtensionBucket(some[0][0], some[1][0]))
        else:
            buckets.append(Bucket(*some))
    return buckets


def create_unsharded(buckets: Sequence[Storage], channels: dict[ShardMesh, Channel]) -> None:
    """Make the unsharded parameters of buckets, before their first gather.

    Collective: for tensor subclasses alone; see :func:`gather_unknown`.
    """
    for bucket in buckets:
        if isinstance(bucket, Bucket) and not hasattr(bucket, "unsharded"):
            bucket.create_unsharded()
    gather_unknown(buckets, channels)


def are_of_kind(buckets: Sequence[Storage]) -> bool:
    """Return whether no shard of a flat bucket was given hooks of its own since it was built."""
    flat = (bucket for bucket in buckets if isinstance(bucket, Bucket))
    return not any(needs_extension(param.local) for bucket in flat for param in bucket.params)


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
            place = param.layout, param.mesh.shard_rank, param.device
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
    pairs = zip(planned, managed.slots, strict=True)
    cut = [(p, original) for p, original in pairs if needs_extension(p.model_part(original))]
    _own_shards([param for param, _ in cut], [original for _, original in cut])


def commit(group: ParamGroup, managed: Managed, planned: Sequence[ShardedParam]) -> None:
    """Register the sharded parameters and move buffers to the device of compute."""
    for param, original in zip(planned, managed.slots, strict=True):
        param.put(param.sharded)
        remember(original, param.slots, group, param)
    device = group.mesh.device
    for module in managed.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)
