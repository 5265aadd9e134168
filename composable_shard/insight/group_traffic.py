"""The messages, bytes and copies of one step of a group, and the reasons for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter

from composable_shard.insight.group_plan import GatherPlan, GroupPlan, MeshPlan, ReducePlan

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
    """Return what one all-gather sends."""
    if mesh.num_shards == 1:
        return Traffic()
    sent: list[int] = []
    for unit in mesh.gathers:
        if unit.sent is None:
            return Traffic(1, len(mesh.gathers), None)
        sent += unit.sent
    if mesh.custom_gather:
        dtypes = {bucket.dtype for bucket in mesh.buckets}
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
    times = 2 if group.residence.in_backward == "gathered" else 1
    found: list[Copy] = []
    for mesh in group.meshes:
        for bucket in mesh.buckets:
            found += _of_gather(bucket, times)
            if group.residence.in_backward == "regathered" and mesh.num_shards > 1:
                found.append(_kept_part(bucket, group.residence.num_neighbours))
        if group.is_reduced and not mesh.is_alone:
            found += chain.from_iterable(_of_reduction(one, mesh) for one in mesh.reductions)
            found += map(_widened, filter(attrgetter("is_widened"), mesh.all_reductions))
    return tuple(found)


def _of_gather(bucket: GatherPlan, times: int) -> Iterator[Copy]:
    layout, names = bucket.layout, bucket.names
    itemsize = bucket.dtype.itemsize
    if layout.num_shards == 1:
        if not bucket.shares_storage:
            yield Copy(
                "cast",
                names,
                bucket.unsharded_nbytes,
                times,
                f"stored as {short(bucket.stored_dtype)}, computed with as {short(bucket.dtype)}",
            )
        return
    if bucket.is_away:
        why = "shards on the CPU are copied to the device of compute before each gather"
        yield Copy("moved", names, bucket.sharded_nbytes, times, why)
    if bucket.is_cast:
        yield Copy(
            "cast",
            names,
            layout.shard_numel * itemsize,
            times,
            f"shards stored as {short(bucket.stored_dtype)} are cast to {short(bucket.dtype)} in "
            "one kernel before each gather, so that fewer bytes travel",
        )
    if layout.permuted:
        yield Copy(
            "permuted",
            bucket.named(layout.permuted),
            sum(layout.params[index].numel for index in layout.permuted) * itemsize,
            times,
            "sharded on an inner dim, so shards laid end to end are not the parameter",
        )
    if layout.packed_numel:
        yield Copy(
            "packed",
            bucket.named(layout.packed),
            bucket.packed_nbytes,
            times,
            "too small to be worth a message of their own: they share one and are copied out of it",
        )


def _kept_part(bucket: GatherPlan, num_neighbours: int) -> Copy:
    return Copy(
        "kept",
        bucket.names,
        bucket.unsharded_nbytes // num_neighbours,
        1,
        f"each of {num_neighbours} neighbours keeps a part of all parameters from forward to "
        "backward",
    )


def _of_reduction(plan: ReducePlan, mesh: MeshPlan) -> Iterator[Copy]:
    layout = plan.layout
    yield from _gradients_not_as_they_are(plan)
    if layout.permuted:
        uneven = [layout.params[i] for i in layout.permuted if not layout.params[i].is_even]
        numel = sum(layout.params[index].numel for index in layout.permuted)
        if plan.reads_padding:
            numel += sum(param.gathered_numel for param in uneven)
        yield Copy(
            "permuted",
            plan.named(layout.permuted),
            numel * plan.dtype.itemsize,
            1,
            "gradients of parameters sharded on an inner dim are laid out shard by shard",
        )
    flags = "one flag for each gradient tells the ranks whether anybody has it"
    small = f"gradients too small to be worth a message share one, and {flags}"
    if plan.packed_nbytes:
        yield Copy(
            "packed",
            plan.named(layout.packed),
            plan.packed_nbytes,
            1,
            small if layout.packed else flags,
        )
    if mesh.num_shards == 1:
        yield Copy(
            "moved",
            plan.names,
            sum(plan.scattered),
            1,
            "nobody shares these parameters: gradients are laid into the buffer to all-reduce",
        )
    yield from _of_result(plan)


def _gradients_not_as_they_are(plan: ReducePlan) -> Iterator[Copy]:
    layout = plan.layout
    cast: list[int] = []
    padded: list[int] = []
    for index in layout.direct:
        if not plan.goes_as_it_is(index):
            (cast if layout.params[index].is_even else padded).append(index)
    reasons = {
        "cast": f"gradients are cast to {short(plan.dtype)}, in which they are summed",
        "padded": "rows do not divide evenly by the ranks, so the gradient is padded to send it",
    }
    for kind, indices in (("cast", cast), ("padded", padded)):
        if indices:
            params = [layout.params[index] for index in indices]
            numel = sum(p.gathered_numel if plan.reads_padding else p.numel for p in params)
            names = plan.named(tuple(indices))
            yield Copy(kind, names, numel * plan.dtype.itemsize, 1, reasons[kind])


def _widened(plan: ReducePlan) -> Copy:
    narrow, wide = short(plan.dtype), short(plan.replica_dtype)
    return Copy(
        "cast",
        plan.names,
        plan.all_reduced_nbytes + plan.result_nbytes,
        1,
        f"sums of {narrow} are cast to {wide} to be summed over the replicas, and rounded once",
    )


def _of_result(plan: ReducePlan) -> Iterator[Copy]:
    finals = set(plan.final_dtypes)
    if finals == {plan.dtype} and not plan.is_away:
        return
    if len(finals) == 1:
        nbytes = plan.result_numel * next(iter(finals)).itemsize
    else:
        nbytes = sum(
            param.shard_numel * dtype.itemsize
            for param, dtype in zip(plan.layout.params, plan.final_dtypes, strict=True)
            if dtype != plan.dtype or plan.is_away
        )
    names = ", ".join(sorted(map(short, finals)))
    place = " and copied to the CPU, where the optimizer is" if plan.is_away else ""
    why = f"reduced gradients of {short(plan.dtype)} are turned into {names}{place}"
    yield Copy("moved" if plan.is_away else "cast", plan.names, nbytes, 1, why)


def short(dtype: object) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")
