"""What sharding does to a model, told before it runs."""

from __future__ import annotations

from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.param import ShardedParam
from composable_shard.insight.groups.advice import advice_on_groups
from composable_shard.insight.groups.copies import short, step_copies
from composable_shard.insight.groups.explanation import (
    Explanation,
    GroupExplanation,
    ParameterExplanation,
)
from composable_shard.insight.groups.plan import GatherPlan, GroupPlan, MeshPlan, SubclassPlan
from composable_shard.insight.groups.read import Names, full_name, read_group
from composable_shard.insight.groups.traffic import step_traffic
from composable_shard.module import group_of

ROOT = "(root)"


def explain(model: nn.Module) -> Explanation:
    """Tell what sharding does to a model: what it keeps, sends, packs, copies and casts, and why.

    Read off the layouts, policies and routes that the step will use, for one step in which each
    module is called once. Works before the first forward and under fake ranks, and changes nothing.

    Args:
        model: A sharded module, or one with sharded modules inside.

    Returns:
        An :class:`Explanation`: ``print`` it, ask it for ``to_dict()``, or let rich or a notebook
        show it.

    Raises:
        ValueError: If nothing in the module is sharded.

    Collective: none.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(4):
        ...     model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
        ...     for layer in model:
        ...         _ = fully_shard(layer)
        ...     explanation = explain(fully_shard(model))
        >>> [group.name for group in explanation.groups]
        ['(root)', '0', '1']
        >>> explanation.groups[1].traffic.forward_gathers
        Traffic(launches=1, messages=1, nbytes=196608)
    """
    names = {module: name for name, module in model.named_modules()}
    groups = list(dict.fromkeys(group for m in names if (group := group_of(m)) is not None))
    if not groups:
        raise ValueError(
            f"Expected sharded modules in {type(model).__name__}, got none; apply fully_shard to it"
        )
    read = [(group, read_group(group, _name_of(group, names), names)) for group in groups]
    return Explanation(
        tuple(_explain_group(group, plan, names) for group, plan in read),
        advice_on_groups(model, read),
    )


def _name_of(group: ParamGroup, names: Names) -> str:
    inside = [names[module] for module in group.modules if module in names]
    return ", ".join(inside) or ROOT


def _explain_group(group: ParamGroup, plan: GroupPlan, names: Names) -> GroupExplanation:
    return GroupExplanation(
        name=plan.name,
        modules=tuple(_class_of(module) for module in group.modules),
        parameters=tuple(_explain_param(param, plan, names) for param in group.params),
        sharded_nbytes=plan.sharded_nbytes,
        gathered_nbytes=plan.unsharded_nbytes,
        traffic=step_traffic(plan),
        copies=step_copies(plan),
        reasons=_reasons(plan),
    )


def _class_of(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _explain_param(param: ShardedParam, plan: GroupPlan, names: Names) -> ParameterExplanation:
    name = full_name(param, names)
    with _torch.without_overrides():
        is_trained = param.sharded.requires_grad
    unit, index = _unit_of(plan, name)
    if isinstance(unit, SubclassPlan):
        sharded, gathered, travels = unit.sharded_nbytes, unit.unsharded_nbytes, "as a subclass"
    else:
        layout = unit.layout.params[index]
        sharded = layout.shard_numel * unit.dtype.itemsize
        gathered = layout.gathered_numel * unit.compute_dtype.itemsize
        travels = _way_of(unit, index)
    return ParameterExplanation(
        name=name,
        shape=tuple(param.shape),
        dtype=short(param.local.dtype),
        placements=tuple(_placement_text(p) for p in param.placement.sharded),
        num_shards=param.mesh.num_shards,
        num_replicas=param.mesh.num_replicas,
        is_trained=is_trained,
        sharded_nbytes=sharded,
        gathered_nbytes=gathered,
        travels=travels,
    )


def _unit_of(plan: GroupPlan, name: str) -> tuple[GatherPlan | SubclassPlan, int]:
    for mesh in plan.meshes:
        for unit in mesh.gathers:
            if isinstance(unit, SubclassPlan) and unit.name == name:
                return unit, 0
            if isinstance(unit, GatherPlan) and name in unit.members.names:
                return unit, unit.members.names.index(name)
    raise AssertionError(name)


def _way_of(bucket: GatherPlan, index: int) -> str:
    layout = bucket.layout
    if layout.num_shards == 1:
        return "not at all"
    if index in layout.packed:
        return "packed"
    return "permuted" if index in layout.permuted else "in place"


def _placement_text(placement: object) -> str:
    dim = getattr(placement, "dim", None)
    return "Replicate" if dim is None else f"Shard({dim})"


def _reasons(plan: GroupPlan) -> tuple[str, ...]:
    if not any(mesh.gathers for mesh in plan.meshes):
        return ("it has no parameters of its own, so it sends nothing",)
    told = [plan.residence.why]
    for mesh in plan.meshes:
        told += _reasons_of_mesh(mesh)
    if not plan.is_reduced:
        told.append("gradient sync is off: gradients stay unsharded on this rank until it is on")
    return tuple(told)


def _reasons_of_mesh(mesh: MeshPlan) -> list[str]:
    told = []
    if mesh.num_shards == 1:
        told.append("one rank holds each parameter whole, so nothing is gathered")
    buckets = mesh.buckets
    if len(buckets) > 1:
        kinds = ", ".join(f"{short(b.dtype)} as {short(b.compute_dtype)}" for b in buckets)
        told.append(f"parameters of different dtypes lie in {len(buckets)} buffers: {kinds}")
    if len(mesh.reductions) > 1:
        dtypes = ", ".join(short(one.dtype) for one in mesh.reductions)
        told.append(f"gradients are reduced in {dtypes}, each in a launch of its own")
    for unit in mesh.subclasses:
        told.append(_subclass_text(unit))
    if mesh.num_replicas > 1 and not mesh.all_reduces:
        told.append("the all-reduce over the replicas is off: gradients wait for it")
    if mesh.num_replicas > 1 and mesh.all_reduces and mesh.reductions:
        told.append(
            f"{mesh.num_replicas} replicas hold the same shards, so the reduced gradients of this "
            "rank are reduced over them as well"
        )
    if mesh.custom_gather or mesh.custom_reduce:
        told.append("custom communication copies what it sends, and what arrives, into one tensor")
    return told


def _subclass_text(unit: SubclassPlan) -> str:
    who = f"{unit.name} is a tensor subclass"
    if not unit.has_hooks:
        return f"{who} that travels inner tensor by inner tensor"
    if unit.sent is None:
        return f"{who} whose hook says at the first gather what it sends"
    return f"{who} whose hook says what it sends"
