"""What a step of whole matrices does on any number of ranks, laid out without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from composable_shard.insight.live_bytes import OptimizerBytes, optimizer_bytes
from composable_shard.optim.blocks import Block, Spread, route_of, spread_over
from composable_shard.optim.layouts import (
    BUCKET_NBYTES,
    Fits,
    Layout,
    Owned,
    Owners,
    Sharded,
    check,
    plan_group,
    sort_by_layout,
)
from composable_shard.optim.plan import BucketPlan, GroupSteps, LayoutSteps
from composable_shard.optim.stepping import Factory, Param, plan_bucket

Extents = tuple[int, ...]


def plan_layouts(
    model: nn.Module, layouts: Mapping[Fits, Layout], lengths: Mapping[str, int], *, at_once: bool
) -> tuple[LayoutSteps, OptimizerBytes]:
    """Return what a step does on the rank that has most to do, and what its optimizers need.

    Args:
        model: Sharded, over fewer ranks.
        layouts: As for ``with_layout``.
        lengths: The ranks of each axis.
        at_once: See :func:`optimizer_bytes`.

    Raises:
        ValueError: If a parameter does not fit its layout.
    """
    rules = sort_by_layout(model, layouts)
    for layout, params in rules:
        check(layout, params)
    owners = Owners[Extents]()
    buckets = [
        []
        if isinstance(layout, Sharded)
        else owners.buckets(layout, params, [_lying(p, lengths) for p in params], BUCKET_NBYTES)
        for layout, params in rules
    ]
    load = owners.loads[0] if owners.loads else (0,)
    rank = load.index(max(load))
    groups, needed = [], []
    for (layout, params), some in zip(rules, buckets, strict=True):
        if isinstance(layout, Sharded):
            groups.append(_sharded_group(params))
            needed.append(_bytes_of_shards(layout, params, lengths, at_once=at_once))
            continue
        plans = [_plan_bucket(params, blocks, rank) for _, blocks in some]
        groups.append(plan_group(layout, params, plans))
        needed += [_bytes_of_blocks(layout, params, plan, at_once=at_once) for plan in plans]
    steps = LayoutSteps(tuple(groups), owners.loads)
    besides = max((one.besides for one in needed), default=0)
    return steps, OptimizerBytes(sum(one.state for one in needed), steps.most_held + besides)


def _lying(param: Param, lengths: Mapping[str, int]) -> tuple[Extents, Spread]:
    """Return the mesh that a parameter will lie on, and how."""
    names = None if param.mesh is None else param.mesh.mesh_dim_names
    extents = tuple(lengths[name] for name in names or ())
    return extents, spread_over(param.tensor.shape, extents, param.dims)


def _plan_bucket(params: Sequence[Param], blocks: Sequence[Block], rank: int) -> BucketPlan:
    routes = [route_of(block, rank % len(block.spread.boxes)) for block in blocks]
    return plan_bucket(params, routes, params[0].local().device)


def _sharded_group(params: Sequence[Param]) -> GroupSteps:
    trained = [param.tensor for param in params if param.is_trained]
    return GroupSteps("Sharded", len(trained), sum(map(torch.numel, trained)), len(trained))


def _bytes_of_shards(
    layout: Sharded, params: Sequence[Param], lengths: Mapping[str, int], *, at_once: bool
) -> OptimizerBytes:
    shapes = [
        (_lying(param, lengths)[1].boxes[0].sizes, param.tensor.dtype)
        for param in params
        if param.is_trained
    ]
    return _bytes_of(layout.optimizer, shapes, at_once=at_once)


def _bytes_of_blocks(
    layout: Owned, params: Sequence[Param], plan: BucketPlan, *, at_once: bool
) -> OptimizerBytes:
    blocks = [one.route.block for one in plan.parcels if one.route.is_owner]
    shapes = [(block.shape, params[block.param].tensor.dtype) for block in blocks]
    return _bytes_of(layout.optimizer, shapes, at_once=at_once)


def _bytes_of(
    factory: Factory, shapes: Sequence[tuple[Sequence[int], torch.dtype]], *, at_once: bool
) -> OptimizerBytes:
    if not shapes:
        return OptimizerBytes(0, 0)
    tensors = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in shapes]

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return factory([{"params": list(params)}])

    return optimizer_bytes(make, tensors, at_once=at_once)
