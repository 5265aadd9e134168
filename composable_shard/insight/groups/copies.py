"""What of a group is packed, copied and cast in one step, and why.

Counted are bytes that operations of torch write, in the phases of forward and backward; what a
collective does within itself is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from composable_shard.insight.groups.plan import GatherPlan, GroupPlan, MeshPlan, ReducePlan


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
    return tuple(found)


def _of_gather(bucket: GatherPlan, times: int) -> Iterator[Copy]:
    layout, names = bucket.layout, bucket.members.names
    itemsize = bucket.compute_dtype.itemsize
    if layout.num_shards == 1:
        if not bucket.shares_storage:
            yield Copy(
                "cast",
                names,
                bucket.unsharded_nbytes,
                times,
                f"stored as {short(bucket.dtype)}, computed with as {short(bucket.compute_dtype)}",
            )
        return
    if bucket.crosses:
        why = "shards on the CPU are copied to the device of compute before each gather"
        yield Copy("moved", names, bucket.sharded_nbytes, times, why)
    if bucket.dtype != bucket.compute_dtype:
        yield Copy(
            "cast",
            names,
            layout.shard_numel * itemsize,
            times,
            f"shards stored as {short(bucket.dtype)} are cast to {short(bucket.compute_dtype)} in "
            "one kernel before each gather, so that fewer bytes travel",
        )
    if layout.permuted:
        yield Copy(
            "permuted",
            bucket.members.named(layout.permuted),
            sum(layout.params[index].numel for index in layout.permuted) * itemsize,
            times,
            "sharded on an inner dim, so shards laid end to end are not the parameter",
        )
    if layout.packed_numel:
        yield Copy(
            "packed",
            bucket.members.named(layout.packed),
            bucket.packed_nbytes,
            times,
            "too small to be worth a message of their own: they share one and are copied out of it",
        )


def _kept_part(bucket: GatherPlan, num_neighbours: int) -> Copy:
    return Copy(
        "kept",
        bucket.members.names,
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
        numel += sum(param.gathered_numel for param in uneven)
        yield Copy(
            "permuted",
            plan.members.named(layout.permuted),
            numel * plan.dtype.itemsize,
            1,
            "gradients of parameters sharded on an inner dim are laid out shard by shard",
        )
    flags = "one flag for each gradient tells the ranks whether anybody has it"
    small = f"gradients too small to be worth a message share one, and {flags}"
    if plan.packed_nbytes:
        yield Copy(
            "packed",
            plan.members.named(layout.packed),
            plan.packed_nbytes,
            1,
            small if layout.packed else flags,
        )
    if mesh.num_shards == 1:
        yield Copy(
            "moved",
            plan.members.names,
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
            numel = sum(layout.params[index].gathered_numel for index in indices)
            names = plan.members.named(tuple(indices))
            yield Copy(kind, names, numel * plan.dtype.itemsize, 1, reasons[kind])


def _of_result(plan: ReducePlan) -> Iterator[Copy]:
    finals = set(plan.final_dtypes)
    if finals == {plan.dtype} and not plan.crosses:
        return
    if len(finals) == 1:
        nbytes = plan.result_numel * next(iter(finals)).itemsize
    else:
        nbytes = sum(
            param.shard_numel * dtype.itemsize
            for param, dtype in zip(plan.layout.params, plan.final_dtypes, strict=True)
            if dtype != plan.dtype or plan.crosses
        )
    names = ", ".join(sorted(map(short, finals)))
    place = " and copied to the CPU, where the optimizer is" if plan.crosses else ""
    why = f"reduced gradients of {short(plan.dtype)} are turned into {names}{place}"
    yield Copy("moved" if plan.crosses else "cast", plan.members.names, nbytes, 1, why)


def short(dtype: object) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")
