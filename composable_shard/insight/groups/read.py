"""Reading a plan off a group: nothing is sent, and the group stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn

from composable_shard import _torch
from composable_shard.core.comms.channel import Channel
from composable_shard.core.comms.custom import CustomAllGather, CustomReduceScatter
from composable_shard.core.grads.route import Route
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.bucket import GatherUnit, ParamBucket
from composable_shard.core.params.extension import Format, flatten, has_extension
from composable_shard.core.params.extension_gather import ExtensionGather
from composable_shard.core.params.layout import BucketLayout
from composable_shard.core.params.param import ShardedParam
from composable_shard.core.params.staging import fuses_on
from composable_shard.insight.groups.plan import (
    GatherPlan,
    GroupPlan,
    Members,
    MeshPlan,
    ReducePlan,
    SubclassPlan,
)
from composable_shard.insight.groups.residence import residence_of

Names = Mapping[nn.Module, str]
"""Names of modules within the model that is looked at."""


def read_group(group: ParamGroup, name: str, names: Names) -> GroupPlan:
    """Return the plan of a group.

    Args:
        group: The group.
        name: What to call it.
        names: How modules are called.
    """
    routes = group.gradients.next_routes()
    return GroupPlan(
        name,
        tuple(
            _read_mesh(group, channel, some, names)
            for channel, some in zip(group.channels.values(), routes, strict=True)
        ),
        residence_of(group),
        group.settings.requires_gradient_sync,
    )


def full_name(param: ShardedParam, names: Names) -> str:
    """Return the name of a parameter in the model; that of the first place if it is tied."""
    module, attribute, _ = param.slots[0]
    prefix = names.get(module, "")
    return f"{prefix}.{attribute}" if prefix else attribute


def _read_mesh(
    group: ParamGroup, channel: Channel, routes: Sequence[Route], names: Names
) -> MeshPlan:
    mesh = channel.mesh
    widens = channel.reduce_scatter.widens
    return MeshPlan(
        num_shards=mesh.num_shards,
        num_replicas=mesh.num_replicas,
        gathers=tuple(_read_unit(unit, names) for unit in group.units.members if unit.mesh == mesh),
        reductions=tuple(_read_route(route, names, widens=widens) for route in routes),
        all_reduces=group.settings.reduction.all_reduces,
        custom_gather=isinstance(channel.all_gather, CustomAllGather),
        custom_reduce=isinstance(channel.reduce_scatter, CustomReduceScatter),
        is_alone=mesh.num_ranks == 1 and group.settings.reduction.hook is None,
    )


def _read_unit(unit: GatherUnit, names: Names) -> GatherPlan | SubclassPlan:
    if isinstance(unit, ParamBucket):
        first = unit.params[0]
        return GatherPlan(
            members=_members(unit.params, unit.layout, names),
            dtype=unit.sharded.dtype,
            compute_dtype=first.policy.compute_dtype(unit.sharded.dtype),
            crosses=unit.sharded.device.type not in ("meta", unit.mesh.device.type),
            offloads=first.offload is not None,
            pads=fuses_on(unit.mesh.device),
        )
    assert isinstance(unit, ExtensionGather), unit
    local = unit.param.local
    return SubclassPlan(
        name=full_name(unit.param, names),
        sharded_nbytes=sum(leaf.numel() * leaf.itemsize for leaf in _torch.leaves(local)),
        sent=_sent_of(unit),
        num_shards=unit.mesh.num_shards,
        has_hooks=has_extension(local),
    )


def _sent_of(unit: ExtensionGather) -> tuple[int, ...] | None:
    """Return the bytes of each message of a subclass, as the ranks agreed, or will without hooks.

    Its own hook is not called: it may communicate, and may count its calls.
    """
    if unit.mesh.num_shards == 1:
        return ()
    if unit.formats is not None:
        return tuple(map(_padded_nbytes, zip(*unit.formats, strict=True)))
    if has_extension(unit.param.local):
        return None
    layout = unit.param.layout
    inner, _ = flatten([unit.param.local])
    return tuple(layout.shard_numel * tensor.itemsize for tensor in inner)


def _padded_nbytes(formats: Sequence[Format]) -> int:
    """Return the bytes that each rank sends of a tensor, of which some have fewer rows."""
    rows = max(theirs.shape[0] for theirs in formats)
    return rows * prod(formats[0].shape[1:]) * formats[0].dtype.itemsize


def _read_route(route: Route, names: Names, *, widens: bool) -> ReducePlan:
    params = [param for param, _ in route.members]
    return ReducePlan(
        members=_members(params, route.bucket.layout, names),
        dtype=route.bucket.dtype,
        grad_dtypes=tuple(param.compute_dtype for param in params),
        final_dtypes=tuple(route.grad_dtypes()),
        crosses=any(param.device != param.mesh.device for param in params),
        widens=widens,
        offloads=any(param.offload is not None for param in params),
        pads=any(param.mesh.device.type != "cpu" for param in params),
    )


def _members(params: Sequence[ShardedParam], layout: BucketLayout, names: Names) -> Members:
    return Members(
        tuple(full_name(param, names) for param in params),
        layout,
        tuple(param.form.is_replicated for param in params),
    )
