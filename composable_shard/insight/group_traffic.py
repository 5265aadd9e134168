"""The messages, bytes and copies of one step of a group, and the reasons for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from composable_shard.insight.group_plan import (
    GatherPlan,
    GroupPlan,
    MeshPlan,
    ReducePlan,
)

# Messages and bytes of one step of a group: forward, backward, gradients reduced ------------------


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
    def parts(self) -> dict[str, Traffic]:
        """Each of them under the heading that tables give it."""
        return {
            field.name.replace("all_", "all-").replace("_", " "): getattr(self, field.name)
            for field in fields(self)
        }

    @property
    def total(self) -> Traffic:
        """All of them."""
        return total(self.parts.values())


def total(parts: Iterable[Traffic]) -> Traffic:
    """Add up."""
    return sum(parts, Traffic())


def total_traffic(steps: Iterable[StepTraffic]) -> StepTraffic:
    """Add up what groups send, part by part."""
    return StepTraffic(*map(total, zip(*(step.parts.values() for step in steps), strict=True)))


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
    """Return what the all-gathers of one use send: a launch for each bucket."""
    if mesh.num_shards == 1:
        return Traffic()
    sent = [unit.sent for unit in mesh.gathers]
    if mesh.custom_gather:
        sent = [None if one is None else (sum(one),) for one in sent]
    return total(
        Traffic(1, 1, None) if one is None else _launched(one, mesh.num_shards) for one in sent
    )


def regather_traffic(mesh: MeshPlan, num_ranks: int) -> Traffic:
    """Return what a gather from neighbours sends, each of whom keeps an equal part."""
    if mesh.num_shards == 1:
        return Traffic()
    parts = [unit.unsharded_nbytes // num_ranks for unit in mesh.buckets]
    subclasses = Traffic(len(mesh.subclasses), len(mesh.subclasses), None)
    plain = total(_launched([part], num_ranks) for part in parts)
    return plain + subclasses if mesh.subclasses else plain


def reduce_traffic(mesh: MeshPlan) -> Traffic:
    """Return what the reductions over the shards send."""
    if mesh.num_shards == 1:
        return Traffic()
    sent = [one.scattered for one in mesh.reductions]
    if mesh.custom_reduce:
        sent = [(sum(one),) for one in sent]
    return total(_launched(one, mesh.num_shards) for one in sent)


def all_reduce_traffic(mesh: MeshPlan) -> Traffic:
    """Return what the reductions over the replicas send, each around a ring, twice."""
    return total(
        Traffic(1, 1, 2 * (mesh.num_replicas - 1) * one.all_reduced_nbytes // mesh.num_replicas)
        for one in mesh.all_reductions
    )


def _launched(sent: Sequence[int], num_ranks: int) -> Traffic:
    if not sent:
        return Traffic()
    return Traffic(1, len(sent), (num_ranks - 1) * sum(sent))


# What of a group is packed, copied and cast in one step, and why ----------------------------------


@dataclass(frozen=True)
class Copy:
    """Something that is written besides what a collective itself receives.

    Attributes:
        kind: ``"cast"``, ``"packed"``, ``"permuted"``, ``"padded"``, ``"moved"`` to another device,
            or ``"kept"``.
        parameters: Whose.
        nbytes: Bytes that are written each time.
        times: How often in a step.
        why: The reason, a sentence.
    """

    kind: str
    parameters: tuple[str, ...]
    nbytes: int
    times: int
    why: str


def step_copies(group: GroupPlan) -> tuple[Copy, ...]:
    """Return what one step copies, if each module is called once."""
    residence = group.residence
    times = 2 if residence.in_backward == "gathered" else 1
    found: list[Copy] = []
    for mesh in group.meshes:
        for bucket in mesh.buckets:
            found += _of_gather(bucket, times)
            if residence.in_backward == "regathered" and not bucket.shares_storage:
                found.append(_kept_part(bucket, residence.num_neighbours))
        if group.is_reduced and not mesh.is_alone:
            for one in mesh.reductions:
                found += _of_reduction(one)
                found += _of_result(one, is_over_replicas=one in mesh.all_reductions)
    return tuple(copy for copy in found if copy.nbytes)


def _of_gather(bucket: GatherPlan, times: int) -> Iterator[Copy]:
    layout, itemsize = bucket.layout, bucket.dtype.itemsize
    stored, dtype = short(bucket.stored_dtype), short(bucket.dtype)
    if bucket.is_away:
        why = "shards on the CPU are copied to the device of compute before each gather"
        yield Copy("moved", bucket.all_names, bucket.sharded_nbytes, times, why)
    if bucket.num_shards == 1:
        if bucket.is_cast:
            why = f"stored as {stored}, computed with as {dtype}"
            yield Copy("cast", bucket.all_names, bucket.unsharded_nbytes, times, why)
        return
    if bucket.is_cast:
        why = (
            f"shards stored as {stored} are cast to {dtype} in one kernel before each gather, so "
            "that fewer bytes travel"
        )
        yield Copy("cast", bucket.all_names, bucket.sent_nbytes, times, why)
    reasons = {
        "permuted": "sharded on an inner dim, so shards laid end to end are not the parameter",
        "packed": "too small to be worth a message of their own: they share one and are copied out "
        "of it",
    }
    packed = layout.params[layout.num_direct :]
    for kind, why in reasons.items():
        numels = {
            name: param.num_nonempty * param.shard_numel if kind == "packed" else param.numel
            for name, param in zip(bucket.names[layout.num_direct :], packed, strict=True)
            if param.gathers_in_place == (kind == "packed")
        }
        if numels:
            yield Copy(kind, tuple(numels), sum(numels.values()) * itemsize, times, why)


def _kept_part(bucket: GatherPlan, num_neighbours: int) -> Copy:
    return Copy(
        "kept",
        bucket.all_names,
        bucket.unsharded_nbytes // num_neighbours,
        1,
        f"each of {num_neighbours} neighbours keeps a part of all parameters from forward to "
        "backward",
    )


def _of_reduction(plan: ReducePlan) -> Iterator[Copy]:
    num_direct, itemsize = plan.num_direct, plan.dtype.itemsize
    if plan.is_cast and num_direct:
        why = f"gradients are cast to {short(plan.dtype)}, in which they are summed"
        yield Copy("cast", plan.names[:num_direct], plan.direct_numel * itemsize, 1, why)
    members = list(zip(plan.names, plan.layouts, plan.travel_alone, strict=True))
    permuted = {name: param.numel for name, param, _ in members if param.outer > 1}
    if permuted:
        why = "gradients of parameters sharded on an inner dim are laid out shard by shard"
        nbytes = sum(permuted.values()) * plan.grad_dtype.itemsize
        yield Copy("permuted", tuple(permuted), nbytes, 1, why)
    padded = {
        name: plan.num_shards * param.shard_numel * itemsize
        for name, param, travels_alone in members[num_direct:]
        if travels_alone
    }
    why = "rows do not divide evenly by the ranks, so the gradient is padded to send it"
    yield Copy("padded", tuple(padded), sum(padded.values()), 1, why)
    packed = tuple(name for name, _, _ in members[num_direct:] if name not in padded)
    why = "one flag for each gradient tells the ranks whether anybody has it"
    if packed:
        why = f"gradients too small to be worth a message share one, and {why}"
    yield Copy("packed", packed, plan.packed_nbytes - sum(padded.values()), 1, why)
    if plan.num_shards == 1:
        why = "nobody shares these parameters: gradients are laid into the buffer to all-reduce"
        yield Copy("moved", plan.names, plan.result_nbytes, 1, why)


def _of_result(plan: ReducePlan, *, is_over_replicas: bool) -> Iterator[Copy]:
    dtype = short(plan.dtype)
    if is_over_replicas and plan.is_widened:
        nbytes = plan.all_reduced_nbytes + plan.result_nbytes
        wide = short(plan.replica_dtype)
        why = f"sums of {dtype} are cast to {wide} to be summed over the replicas, and rounded once"
        yield Copy("cast", plan.names, nbytes, 1, why)
    finals = set(plan.final_dtypes)
    if finals == {plan.dtype} and not plan.is_away:
        return
    nbytes = plan.final_nbytes
    if len(finals) > 1 and not plan.is_away:
        shards = zip(plan.layouts, plan.final_dtypes, strict=True)
        nbytes = sum(p.shard_numel * final.itemsize for p, final in shards if final != plan.dtype)
    names = ", ".join(sorted(map(short, finals)))
    place = " and copied to the CPU, where the optimizer is" if plan.is_away else ""
    why = f"reduced gradients of {dtype} are turned into {names}{place}"
    yield Copy("moved" if plan.is_away else "cast", plan.names, nbytes, 1, why)


def short(dtype: object) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")
