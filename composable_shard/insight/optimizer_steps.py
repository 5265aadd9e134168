"""What one step of an optimizer works on, sends and occupies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_shard.insight.group_traffic import Traffic, total
from composable_shard.insight.report import (
    Report,
    Section,
    Sentences,
    Table,
    count_text,
    nbytes_text,
)
from composable_shard.optim.flat import FlatSteps
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.optim.plan import BucketPlan, GroupSteps, LayoutSteps


@dataclass(frozen=True)
class OptimizerGroupExplanation:
    """One parameter group of an optimizer.

    Attributes:
        layout: How its parameters are stepped: ``"stock"``, ``"flat"``, or the name of their
            layout.
        num_parameters: How many of them are trained.
        numel: Their elements.
        num_tensors: How many tensors are stepped on this rank; in an estimate, of shards as many
            as there are parameters.
        traffic: What this rank sends in one step; a message goes to one other rank.
    """

    layout: str
    num_parameters: int
    numel: int
    num_tensors: int
    traffic: Traffic


@dataclass(frozen=True)
class OptimizerExplanation(Report):
    """One step of an optimizer, if nothing that is trained lacks a gradient.

    Attributes:
        name: Its class.
        groups: Its parameter groups.
        held_nbytes: The most bytes that matrices on their way occupy on this rank, beside what
            the stock optimizers need.
        imbalance: What the rank with most matrices to step has to do, by the mean of all ranks.
    """

    name: str
    groups: tuple[OptimizerGroupExplanation, ...]
    held_nbytes: int = 0
    imbalance: float = 1.0

    @property
    def traffic(self) -> Traffic:
        """What this rank sends in one step."""
        return total(group.traffic for group in self.groups)

    def sections(self) -> list[Section]:
        """Return the table of parameter groups, then what there is to say."""
        columns = ("parameter group", "as", "parameters", "elements", "tensors", "launches")
        rows = [
            (
                str(place),
                group.layout,
                str(group.num_parameters),
                count_text(group.numel),
                str(group.num_tensors),
                str(group.traffic.launches),
                str(group.traffic.messages),
                nbytes_text(group.traffic.nbytes),
            )
            for place, group in enumerate(self.groups)
        ]
        title = f"A step of {self.name}: tensors that this rank steps, messages and bytes it sends"
        table = Table(title, (*columns, "messages", "sent"), tuple(rows), num_words=2)
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
    """Tell what a step of an optimizer works on, sends and occupies. Collective: none."""
    if isinstance(optimizer, LayoutOptimizer):
        return explain_layouts(optimizer.plan())
    is_flat = isinstance(optimizer, FlatSteps)
    trained = [
        [param for param in group["params"] if param.requires_grad]
        for group in optimizer.param_groups
    ]
    nums = optimizer.num_tensors() if isinstance(optimizer, FlatSteps) else list(map(len, trained))
    return OptimizerExplanation(
        type(optimizer).__name__,
        tuple(
            OptimizerGroupExplanation(
                "flat" if is_flat else "stock",
                len(params),
                sum(param.numel() for param in params),
                num_tensors,
                Traffic(),
            )
            for params, num_tensors in zip(trained, nums, strict=True)
        ),
    )


def explain_layouts(steps: LayoutSteps) -> OptimizerExplanation:
    """Tell it of an optimizer of whole matrices."""
    return OptimizerExplanation(
        "with_layout",
        tuple(map(_explain_group, steps.groups)),
        steps.most_held,
        steps.imbalance,
    )


def _explain_group(group: GroupSteps) -> OptimizerGroupExplanation:
    return OptimizerGroupExplanation(
        group.layout,
        group.num_params,
        group.numel,
        group.num_tensors,
        traffic_of(group.buckets),
    )


def traffic_of(buckets: Sequence[BucketPlan]) -> Traffic:
    """Return what buckets send in one step."""
    sent = [one for bucket in buckets for one in bucket.sent]
    return total(Traffic(1, len(one.to), one.nbytes) for one in sent)
