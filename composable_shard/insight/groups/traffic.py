"""Messages and bytes of one step of a group: forward, backward, gradients reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composable_shard.insight.groups.plan import GroupPlan, MeshPlan


@dataclass(frozen=True)
class Traffic:
    """What this rank sends; it receives as much.

    Attributes:
        launches: Calls of a collective.
        messages: Tensors in all of them, each of which goes to, or over, every other rank.
        nbytes: Bytes that this rank sends, padding included; those of an all-reduce as in a ring.
            ``None`` where a tensor subclass has not said yet what it sends.
    """

    launches: int = 0
    messages: int = 0
    nbytes: int | None = 0

    def __add__(self, other: Traffic) -> Traffic:
        known = self.nbytes is not None and other.nbytes is not None
        return Traffic(
            self.launches + other.launches,
            self.messages + other.messages,
            (self.nbytes or 0) + (other.nbytes or 0) if known else None,
        )


@dataclass(frozen=True)
class StepTraffic:
    """What one group sends in one step.

    Attributes:
        forward_gathers: Gathers for forward.
        backward_gathers: Gathers for backward.
        reductions: Gradients over the shards.
        all_reduces: Gradients over the replicas.
    """

    forward_gathers: Traffic
    backward_gathers: Traffic
    reductions: Traffic
    all_reduces: Traffic

    @property
    def total(self) -> Traffic:
        """All of them."""
        return total(
            (self.forward_gathers, self.backward_gathers, self.reductions, self.all_reduces)
        )


def total(parts: Iterable[Traffic]) -> Traffic:
    """Add up."""
    return sum(parts, Traffic())


def step_traffic(group: GroupPlan) -> StepTraffic:
    """Return what a group sends in one step, if each of its modules is called once."""
    gather = total(map(gather_traffic, group.meshes))
    backward = Traffic()
    if group.residence.in_backward == "gathered":
        backward = gather
    elif group.residence.in_backward == "regathered":
        num_ranks = group.residence.num_neighbours
        backward = total(regather_traffic(mesh, num_ranks) for mesh in group.meshes)
    if not group.is_reduced:
        return StepTraffic(gather, backward, Traffic(), Traffic())
    return StepTraffic(
        gather,
        backward,
        total(map(reduce_traffic, group.meshes)),
        total(map(all_reduce_traffic, group.meshes)),
    )


def gather_traffic(mesh: MeshPlan) -> Traffic:
    """Return what one all-gather sends."""
    if mesh.num_shards == 1:
        return Traffic()
    sent: list[int] = []
    for unit in mesh.gathers:
        if unit.sent is None:
            return Traffic(1, len(mesh.gathers), None)
        sent += unit.sent
    if mesh.custom_gather:
        dtypes = {bucket.compute_dtype for bucket in mesh.buckets}
        return Traffic(len(dtypes), len(dtypes), (mesh.num_shards - 1) * sum(sent))
    return _launched(sent, mesh.num_shards)


def regather_traffic(mesh: MeshPlan, num_ranks: int) -> Traffic:
    """Return what a gather from neighbours sends, each of whom keeps an equal part."""
    if mesh.num_shards == 1:
        return Traffic()
    if mesh.subclasses:
        return Traffic(1, len(mesh.gathers), None)
    return _launched([unit.unsharded_nbytes // num_ranks for unit in mesh.buckets], num_ranks)


def reduce_traffic(mesh: MeshPlan) -> Traffic:
    """Return what the reductions over the shards send: one launch for each dtype."""
    if mesh.num_shards == 1:
        return Traffic()
    launched = total(_launched(one.scattered, mesh.num_shards) for one in mesh.reductions)
    if mesh.custom_reduce:
        return Traffic(launched.launches, launched.launches, launched.nbytes)
    return launched


def all_reduce_traffic(mesh: MeshPlan) -> Traffic:
    """Return what the reductions over the replicas send, each around a ring, twice."""
    if mesh.num_replicas == 1 or not mesh.all_reduces:
        return Traffic()
    return total(
        Traffic(1, 1, 2 * (mesh.num_replicas - 1) * one.result_nbytes // mesh.num_replicas)
        for one in mesh.reductions
    )


def _launched(sent: Sequence[int], num_ranks: int) -> Traffic:
    if not sent:
        return Traffic()
    return Traffic(1, len(sent), (num_ranks - 1) * sum(sent))
