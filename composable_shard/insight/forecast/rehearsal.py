"""Building, sharding and running a model without memory, on few ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.bucket import ParamBucket
from composable_shard.core.params.param import ShardedParam
from composable_shard.insight.forecast.optimizer import (
    OptimizerBytes,
    optimizer_bytes,
    shards_of,
)
from composable_shard.insight.forecast.question import Question, Ranks
from composable_shard.insight.forecast.record import Moment, record_step, silence
from composable_shard.insight.groups.plan import GroupPlan, MeshPlan
from composable_shard.insight.groups.read import read_group
from composable_shard.module import group_of


@dataclass(frozen=True)
class Rehearsal:
    """What was found out.

    Attributes:
        moments: A step.
        groups: The plans of all groups, for the number of ranks that was asked for.
        num_parameters: Elements of all parameters.
        unsharded: Bytes of what is not sharded: parameters, buffers, the batch.
        optimizer: What the optimizer needs for the shards on the device.
        offloaded_optimizer: The same for those on the CPU.
    """

    moments: tuple[Moment, ...]
    groups: tuple[GroupPlan, ...]
    num_parameters: int
    unsharded: int
    optimizer: OptimizerBytes
    offloaded_optimizer: OptimizerBytes


def rehearse(question: Question, ranks: Ranks) -> Rehearsal:
    """Run a step without memory; see :func:`composable_shard.estimate` for what it raises."""
    from composable_shard.testing.ranks import fake_ranks

    replicas, shards = ranks.rehearsing
    with fake_ranks(replicas * shards):
        mesh = _mesh(ranks.is_hybrid, replicas, shards)
        fake = _torch.fake_tensors()
        with fake:
            model = question.build_model()
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"Expected build_model to return an nn.Module, got {type(model).__name__}"
                )
            _take_off_meta(model)
            question.shard(model, mesh)
        groups = _groups_of(model)
        for context in dict.fromkeys(group.context for group in groups):
            context.before_gather()  # it compares numbers, which fake tensors do not have
        silence(groups, widens=not question.is_accelerator)
        with fake:
            try:
                return _run(question, ranks, model, groups)
            except _torch.ReadsValues as error:
                error.add_note(
                    "estimate runs the model on tensors without values, and something in it, or in "
                    "the loss, asks one for its value"
                )
                raise


def _mesh(is_hybrid: bool, replicas: int, shards: int) -> DeviceMesh:
    if not is_hybrid:
        return init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def _take_off_meta(model: nn.Module) -> None:
    """Replace what is on the meta device by tensors that pass for real, ties kept."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if tensor not in made:
                    like = torch.empty_like(tensor, device="cpu")
                    is_param = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(like, tensor.requires_grad) if is_param else like
                held[name] = made[tensor]  # type: ignore[assignment]


def _groups_of(model: nn.Module) -> list[ParamGroup]:
    found = (group_of(module) for module in model.modules())
    groups = list(dict.fromkeys(group for group in found if group is not None))
    if not groups:
        raise ValueError(
            f"Expected shard to apply fully_shard to {type(model).__name__}, got no sharded module"
        )
    for group in groups:
        for unit in group.units.members:
            if not isinstance(unit, ParamBucket):
                raise ValueError(
                    "Expected plain parameters, which can be laid out for any number of ranks, got "
                    "a tensor subclass; estimate the model before its parameters are converted"
                )
        for param in group.params:
            if param.mesh != group.mesh or param.placement.model is not None:
                raise ValueError(
                    f"Expected parameters on the mesh of their group, got '{param.name}' on "
                    "another; estimate knows one axis of shards and one of replicas"
                )
    return groups


def _run(
    question: Question, ranks: Ranks, model: nn.Module, groups: Sequence[ParamGroup]
) -> Rehearsal:
    names = {module: name for name, module in model.named_modules()}
    batch = question.batch() if callable(question.batch) else _torch.without_memory(question.batch)
    sharded = [param.sharded for group in groups for param in group.params]
    ours = {id(tensor) for tensor in sharded}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in ours]
    lasting = [*others, *_torch.tensors_of(batch)]
    locals_ = [param.local for group in groups for param in group.params]

    def run() -> None:
        question.loss(_call(model, batch), batch).backward()
        model.zero_grad()

    record = record_step(groups, [*lasting, *locals_], run)
    plans = tuple(
        _placed(read_group(group, group.name, names), question).over(
            ranks.num_shards, ranks.num_replicas, ranks.num_neighbours or 1
        )
        for group in groups
    )
    resident, offloaded = _optimizers(question, ranks, record.used)
    return Rehearsal(
        record.moments,
        plans,
        sum(param.numel() for param in model.parameters()),
        sum(tensor.numel() * tensor.itemsize for tensor in lasting),
        resident,
        offloaded,
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _placed(plan: GroupPlan, question: Question) -> GroupPlan:
    """Say of each buffer whether it is on the CPU and compute is not."""

    def placed(mesh: MeshPlan) -> MeshPlan:
        gathers = []
        for bucket in mesh.buckets:
            is_away = bucket.offloads and question.is_accelerator
            gathers.append(replace(bucket, crosses=is_away, offloads=is_away))
        reductions = []
        for one in mesh.reductions:
            is_away = one.offloads and question.is_accelerator
            reductions.append(replace(one, crosses=is_away, offloads=is_away))
        return replace(mesh, gathers=tuple(gathers), reductions=tuple(reductions))

    return replace(plan, meshes=tuple(map(placed, plan.meshes)))


def _optimizers(
    question: Question, ranks: Ranks, params: Iterable[ShardedParam]
) -> tuple[OptimizerBytes, OptimizerBytes]:
    found = []
    for is_away in (False, True):
        some = [p for p in params if (p.offload is not None and question.is_accelerator) is is_away]
        shards = shards_of(some, ranks.num_shards)
        if question.optimizer is None or not shards:
            found.append(OptimizerBytes(0, 0))
            continue
        at_once = question.is_accelerator and not is_away
        found.append(optimizer_bytes(question.optimizer, shards, at_once=at_once))
    return found[0], found[1]
