"""One step of an optimizer: the tensors that it steps, its traffic and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composable_shard.insight.group_steps import Traffic, total
from composable_shard.insight.rehearsal import OptimizerBytes, optimizer_bytes
from composable_shard.insight.report import (
    Columns,
    Report,
    Section,
    Sentences,
    Table,
    count_text,
    nbytes_text,
)
from composable_shard.optim.blocks import LayoutSteps, route_of
from composable_shard.optim.flat import FlatSteps
from composable_shard.optim.layouts import (
    BUCKET_NBYTES,
    Fits,
    Layout,
    LayoutOptimizer,
    Sharded,
    check,
    cut_rule,
    plan_group,
    sort_by_layout,
)
from composable_shard.optim.stepping import plan_bucket


@dataclass(frozen=True)
class OptimizerGroupExplanation:
    """One parameter group of an optimizer.

    Attributes:
        layout: How its parameters are stepped: ``"stock"``, ``"flat"``, or the name of their
            layout.
        num_parameters: The number of its trained parameters.
        numel: Their elements.
        num_tensors: The number of tensors that are stepped on this rank; in an estimate, one for
            each sharded parameter.
        traffic: The traffic of this rank in one step; a message goes to one other rank.
    """

    layout: str
    num_parameters: int
    numel: int
    num_tensors: int
    traffic: Traffic


@dataclass(frozen=True)
class OptimizerExplanation(Report):
    """One step of an optimizer, if every trained parameter has a gradient.

    Attributes:
        name: Its class.
        groups: Its parameter groups.
        held_nbytes: The most bytes that matrices on their way occupy on this rank, beside the
            memory of the stock optimizers.
        imbalance: The work of the rank with the most matrices to step, by the mean of all ranks.
    """

    name: str
    groups: tuple[OptimizerGroupExplanation, ...]
    held_nbytes: int = 0
    imbalance: float = 1.0

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank in one step."""
        return total(group.traffic for group in self.groups)

    def sections(self) -> list[Section]:
        """Return the table of parameter groups, then some sentences."""
        columns: Columns = {
            **dict.fromkeys(("parameter group", "as", "parameters"), str),
            "elements": count_text,
            **dict.fromkeys(("tensors", "launches", "messages"), str),
            "sent": nbytes_text,
        }
        rows = []
        for place, group in enumerate(self.groups):
            traffic = group.traffic
            sent = group.num_tensors, traffic.launches, traffic.messages, traffic.nbytes
            rows.append((place, group.layout, group.num_parameters, group.numel, *sent))
        title = f"A step of {self.name}: tensors that this rank steps, messages and bytes it sends"
        table = Table(title, columns, rows, num_words=2)
        sentences = self._sentences()
        return [table, Sentences("Optimizer", sentences)] if sentences else [table]

    def _sentences(self) -> tuple[str, ...]:
        if any(group.layout == "flat" for group in self.groups):
            return ("shards that lie side by side are stepped as one tensor; nothing is sent",)
        if not self.traffic.launches:
            return ()
        return (
            f"matrices on their way occupy at most {nbytes_text(self.held_nbytes)} of this rank, "
            "in at most two buckets",
            f"the rank with most to do has {self.imbalance:.3g} times the work of the mean",
        )


def explain_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerExplanation:
    """Return what a step of an optimizer works on, sends and occupies. Collective: none."""
    if isinstance(optimizer, LayoutOptimizer):
        return explain_layouts(optimizer.plan())
    layout = "flat" if isinstance(optimizer, FlatSteps) else "stock"
    trained = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    nums = optimizer.num_tensors() if isinstance(optimizer, FlatSteps) else list(map(len, trained))
    groups = [
        OptimizerGroupExplanation(layout, len(some), sum(map(torch.numel, some)), num, Traffic())
        for some, num in zip(trained, nums, strict=True)
    ]
    return OptimizerExplanation(type(optimizer).__name__, tuple(groups))


def explain_layouts(steps: LayoutSteps) -> OptimizerExplanation:
    """Return the same of an optimizer of whole matrices."""
    groups = []
    for group in steps.groups:
        sent = [message for bucket in group.buckets for message in bucket.sent]
        traffic = total(Traffic(1, len(message.to), message.nbytes) for message in sent)
        facts = group.layout, group.num_params, group.numel, group.num_tensors
        groups.append(OptimizerGroupExplanation(*facts, traffic))
    return OptimizerExplanation("with_layout", tuple(groups), steps.most_held, steps.imbalance)


# Optimizers of whole matrices, on the rank with the most work ------------------------------------


def plan_layouts(
    model: nn.Module, layouts: Mapping[Fits, Layout], *, at_once: bool
) -> tuple[LayoutSteps, OptimizerBytes]:
    """Return the step of the rank with the most work, and the bytes that its optimizers need.

    Args:
        model: A sharded model.
        layouts: As for ``with_layout``.
        at_once: See :func:`optimizer_bytes`.

    Raises:
        ValueError: If a parameter does not fit its layout.
    """
    rules = sort_by_layout(model, layouts)
    for layout, params in rules:
        check(layout, params)
    loads: dict[tuple[int, ...], list[int]] = {}
    buckets = []
    for layout, params in rules:
        meshes = [() if param.mesh is None else tuple(param.mesh.shape) for param in params]
        cut = []
        if not isinstance(layout, Sharded):
            cut = cut_rule(layout, params, meshes, loads, BUCKET_NBYTES)
        buckets.append([blocks for _, blocks in cut])
    load = next(iter(loads.values()), [0])
    rank = load.index(max(load))
    groups, stepped = [], list[tuple[Layout, list[torch.Tensor]]]()
    for (layout, params), some in zip(rules, buckets, strict=True):
        if isinstance(layout, Sharded):
            trained = [param.local() for param in params if param.tensor.requires_grad]
            groups.append(plan_group(layout, params, num_tensors=len(trained)))
            stepped.append((layout, trained))
            continue
        plans = []
        for blocks in some:
            routes = [route_of(block, rank % len(block.spread.boxes)) for block in blocks]
            plans.append(plan_bucket(params, routes, params[0].local().device))
            own = [one.route.block for one in plans[-1].parcels if one.route.is_owner]
            dtypes = [params[block.param].tensor.dtype for block in own]
            pairs = zip(own, dtypes, strict=True)
            stepped.append((layout, [torch.empty(b.shape, dtype=dtype) for b, dtype in pairs]))
        groups.append(plan_group(layout, params, plans))
    needed = [_bytes_of(layout, tensors, at_once=at_once) for layout, tensors in stepped]
    steps = LayoutSteps(tuple(groups), tuple(loads.values()))
    besides = max((one.besides for one in needed), default=0)
    return steps, OptimizerBytes(sum(one.state for one in needed), steps.most_held + besides)


def _bytes_of(layout: Layout, like: Sequence[torch.Tensor], *, at_once: bool) -> OptimizerBytes:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return layout.optimizer([{"params": list(params)}])

    return optimizer_bytes(make, like, at_once=at_once)
