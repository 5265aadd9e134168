"""One step of a group: its traffic, its copies, and how long its parameters stay.

Everything is read off the buckets of the group; nothing is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from operator import itemgetter

import torch
from torch import nn

from composable_shard import _torch, hybrid
from composable_shard.core.codec import flatten, has_extension
from composable_shard.core.extension import ExtensionBucket
from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import is_packed, plan_messages
from composable_shard.core.placement import packing_alignment
from composable_shard.core.program import reduced_together
from composable_shard.core.reduction import LocalReduction, final_grad_dtype, is_direct, sent_dtype
from composable_shard.core.storage import Bucket, FlatBucket, ShardedParam
from composable_shard.core.transport.collectives import sum_dtype
from composable_shard.insight.events import name_in
from composable_shard.wire import WireReduction, row_nbytes, sent_nbytes


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


# Messages and bytes of one step -------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """The traffic that this rank sends; it receives as much.

    Attributes:
        launches: Calls of a collective.
        messages: Tensors in all of them; each goes to, or over, every other rank. Custom
            communication may send them as one.
        nbytes: Bytes that this rank sends, padding included; those of an all-reduce as in a ring.
            ``None`` before the first gather of a tensor subclass.
    """

    launches: int = 0
    messages: int = 0
    nbytes: int | None = 0

    @classmethod
    def of(cls, messages: Sequence[int] | None, num_ranks: int) -> Traffic:
        """Return the traffic of one launch of messages to each other rank, given their bytes."""
        if messages is None:
            return cls(1, 1, None)
        return cls(1, len(messages), (num_ranks - 1) * sum(messages)) if messages else cls()

    def __add__(self, other: Traffic) -> Traffic:
        is_known = self.nbytes is not None and other.nbytes is not None
        nbytes = (self.nbytes or 0) + (other.nbytes or 0) if is_known else None
        return Traffic(self.launches + other.launches, self.messages + other.messages, nbytes)


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one step.

    Attributes:
        forward_gathers: Gathers for forward.
        backward_gathers: Gathers for backward.
        reductions: Gradients over the shards.
        all_reduces: Gradients over the replicas; with ``sharding="hybrid"``, also parameters.
    """

    forward_gathers: Traffic = Traffic()
    backward_gathers: Traffic = Traffic()
    reductions: Traffic = Traffic()
    all_reduces: Traffic = Traffic()

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(*map(Traffic.__add__, self.parts.values(), other.parts.values()))

    @property
    def parts(self) -> dict[str, Traffic]:
        """Each part, by its heading in tables."""
        return {
            field.name.replace("all_", "all-").replace("_", " "): getattr(self, field.name)
            for field in fields(self)
        }

    @property
    def total(self) -> Traffic:
        """The sum of all parts."""
        return total(self.parts.values())


def total(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of parts."""
    return sum(parts, Traffic())


def traffic_of(group: ParamGroup) -> StepTraffic:
    """Return the traffic of a step in which each module of the group is called once."""
    gathered = total(map(_gather, group.buckets))
    in_backward, _ = residence_of(group)
    backward = gathered if in_backward == "gathered" else Traffic()
    if in_backward == "regathered":
        backward = total(map(_regather, group.buckets))
    reductions = reductions_of(group)
    over_shards = total(reduction.over_shards for reduction in reductions)
    over_replicas = total(reduction.over_replicas for reduction in reductions)
    over_replicas += total(_gather(bucket.parts) for bucket in hybrid.part_buckets(group))
    return StepTraffic(gathered, backward, over_shards, over_replicas)


# How long the unsharded parameters of a group stay, and why ---------------------------------------


def residence_of(group: ParamGroup) -> tuple[str, str]:
    """Return how the parameters of a group come back for backward, and the reason as a sentence.

    They are ``"kept"``, ``"gathered"``, ``"regathered"`` from neighbours, or ``"unread"``. The last
    step decides. Before the first one, groups count as run in the order in which they are
    registered.
    """
    settings, reshard = group.settings, group.settings.reshard_after_forward
    if not group.params:
        return "unread", "the group has no parameters of its own, so it sends nothing"
    if not settings.unshard_in_backward:
        return "unread", "set_unshard_in_backward(False): backward gathers nothing"
    if not _has_backward(group):
        return "unread", "backward does not reach the group: nothing in it or before it is trained"
    if settings.gathers_once_a_step:
        return "kept", "the parameters are kept until the optimizer has stepped"
    if reshard is False:
        return "kept", "reshard_after_forward=False keeps the parameters until backward"
    if group.stays_after_forward:
        return "kept", "backward needs the parameters of the root first, so they are kept"
    if _ends_forward_and_begins_backward(group):
        return "kept", "the last group in forward is first in backward, so it stays from step 2 on"
    if reshard not in (None, True):
        return "regathered", f"each of {reshard} neighbours keeps a part, which backward gathers"
    then = "freed after forward and gathered again for backward"
    if settings.keeps_storage:
        then = "gathered again for backward, into memory that is kept"
    return "gathered", f"the parameters are {then}"


def _ends_forward_and_begins_backward(group: ParamGroup) -> bool:
    tree = group.tree
    if tree.plan.groups:
        return bool(tree.tape.was_turning_point(tree.root, group))
    *before, last = [member for member in tree.groups if member.params]
    encloses = (set(group.modules) & set(member.all_modules()) for member in before)
    return group is last and not any(encloses)


def _has_backward(group: ParamGroup) -> bool:
    """Return whether backward reaches the group; before the first step, whether it may."""
    tree = group.tree
    if tree.plan.groups:
        return group in tree.plan.groups
    places = {module: place for place, module in enumerate(tree.root.all_modules())}
    end = max(places[module] for module in group.all_modules())
    params = (param for member in tree.groups for param in member.params)
    return any(
        param.sharded.requires_grad for param in params if places[param.slots[0].module] <= end
    )


# The gather of one bucket -------------------------------------------------------------------------


def unsharded_nbytes(bucket: Bucket) -> int | None:
    """Return the bytes of a gathered bucket; ``None`` before a subclass is gathered."""
    if isinstance(bucket, FlatBucket):
        numel = 0 if bucket.shares_storage else bucket.layout.unsharded_numel
        return numel * bucket.compute_dtype.itemsize
    sent = messages_of(bucket)
    return None if sent is None else bucket.mesh.num_shards * sum(sent)


def stored_in(bucket: FlatBucket) -> torch.Tensor:
    """Return the flat buffer of the shards that users see."""
    return bucket.parts.sharded if isinstance(bucket, hybrid.PartBucket) else bucket.sharded


def sharded_nbytes(bucket: Bucket) -> int:
    """Return the bytes of this rank's shards, padding included."""
    if isinstance(bucket, FlatBucket):
        return stored_in(bucket).numel() * stored_in(bucket).itemsize
    return sum(leaf.numel() * leaf.itemsize for leaf in _torch.leaves(bucket.locals[0]))


def messages_of(bucket: Bucket) -> list[int] | None:
    """Return the bytes of each message of a gather; ``None`` before a subclass is gathered.

    The hook of a subclass is not called: it may communicate, and may count its calls.
    """
    if bucket.mesh.num_shards == 1:
        return []
    if isinstance(bucket, FlatBucket):
        encoded, itemsize = sent_nbytes(bucket), bucket.compute_dtype.itemsize
        return encoded or [numel * itemsize for _, numel in bucket.layout.message_spans]
    assert isinstance(bucket, ExtensionBucket)
    if bucket.formats is not None:  # by rank; each tensor is padded to the most rows of a rank
        return [
            max(prod(format.shape) for format in formats) * formats[0].dtype.itemsize
            for formats in zip(*bucket.formats, strict=True)
        ]
    if has_extension(bucket.param.local):
        return None
    inner, _ = flatten([bucket.param.local])
    return [bucket.param.layout.flat.shard_numel * tensor.itemsize for tensor in inner]


def num_neighbours(group: ParamGroup) -> int:
    """Return the number of ranks that together keep the parameters for backward."""
    return int(group.settings.reshard_after_forward or 1)


def kept_nbytes(bucket: Bucket) -> int:
    """Return the bytes of a bucket that each neighbour keeps for backward."""
    return (unsharded_nbytes(bucket) or 0) // num_neighbours(bucket.params[0].group)


def _gather(bucket: Bucket) -> Traffic:
    return Traffic.of(messages_of(bucket), bucket.mesh.num_shards)


def _regather(bucket: Bucket) -> Traffic:
    if bucket.mesh.num_shards == 1:
        return Traffic()
    part = [kept_nbytes(bucket)] if isinstance(bucket, FlatBucket) else None
    return Traffic.of(part, num_neighbours(bucket.params[0].group))


# The reductions of one group ----------------------------------------------------------------------


class ReductionPlan:
    """The gradients of a group that are reduced together.

    Attributes:
        mesh: The ranks.
        dtype: The dtype of the sum.
        grad_dtype: The dtype of the gradients.
        sent_dtype: The dtype in which gradients with their own message are sent.
        replica_dtype: The dtype of the sum over the replicas.
        is_alone: Whether the gradients are the result, without a reduction.
        is_encoded: Whether they are sent in a format of the policy.
        is_all_reduced: Whether they are reduced over the replicas.
        large: The parameters with gradients too large to pack.
        direct: Those that are sent without a copy.
        members: All parameters in the order of the messages.
        layouts: The layouts of their gradients; inner tensors of a subclass are stacked.
        finals: The dtype of ``.grad`` of each of them.
        numel: Elements of all messages to one rank, flags included.
        packed_numel: Elements of the last message, with the packed gradients and the flags.
        over_shards: The traffic of the reduction over the shards.
        over_replicas: The traffic of the reduction over the replicas: around a ring, twice.
    """

    def __init__(
        self,
        group: ParamGroup,
        kind: type,
        buckets: Sequence[Bucket],
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
    ) -> None:
        mesh = self.mesh = buckets[0].mesh
        channel = group.channels[mesh]
        self.dtype, self.is_alone = dtype, kind is LocalReduction
        self.is_encoded = kind is WireReduction
        self.grad_dtype = buckets[0].compute_dtype
        self.sent_dtype = sent_dtype(buckets, dtype, channel)
        if kind is hybrid.OverReplicas:  # it gets results of another reduction
            self.grad_dtype = self.sent_dtype = dtype
        itemsize, cost = dtype.itemsize, buckets[0].message_cost
        self.large = {p for p in params if not is_packed(p.layout.flat, itemsize, cost)}
        self.direct = [p for p in params if is_direct(dtype, cost, p)]
        self.members = sorted(params, key=lambda param: param not in self.direct)
        self.finals = [final_grad_dtype(param, dtype) for param in self.members]
        self.layouts = [param.grad_layout.flat for param in self.members]
        step = packing_alignment((dtype, *self.finals), mesh.device)
        numels, _ = plan_messages(self.layouts, len(self.direct), step)
        self.numel, self.packed_numel = sum(numels), numels[-1]
        self.is_all_reduced = mesh.num_replicas > 1 and group.settings.all_reduce_grads
        self.is_all_reduced = self.is_all_reduced and kind is not hybrid.PartReduction
        is_widened = channel.divides_over_replicas(dtype)
        self.replica_dtype = sum_dtype(dtype) if is_widened else dtype
        self.over_shards = self.over_replicas = Traffic()
        if mesh.num_shards > 1:
            sent = [numel * dtype.itemsize for numel in numels]
            sent = [row_nbytes(params)] if self.is_encoded else sent
            self.over_shards = Traffic.of(sent, mesh.num_shards)
        if self.is_all_reduced:
            nbytes, num = self.numel * self.replica_dtype.itemsize, mesh.num_replicas
            self.over_replicas = Traffic(1, 1, 2 * (num - 1) * nbytes // num)
        if kind is hybrid.OverReplicas:
            self.over_shards, self.over_replicas = self.over_replicas, self.over_shards


def reductions_of(group: ParamGroup) -> list[ReductionPlan]:
    """Return the reductions of a group in one step, each in its own launch."""
    if not group.settings.reduce_grads:
        return []
    trained = [p for p in group.params if p.sharded.requires_grad or p.name in group.unsynced]
    found = []
    for kind, buckets, params, dtype in reduced_together(group, trained):
        found.append(ReductionPlan(group, kind, buckets, params, dtype))
        if kind is hybrid.PartReduction:
            parts = hybrid.parts_of(buckets, params)
            found.append(ReductionPlan(group, hybrid.OverReplicas, *parts, dtype))
    return found


# One group, explained -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterExplanation:
    """One parameter.

    Attributes:
        name: Its name in the model.
        shape: Its global shape.
        dtype: The dtype of its shard.
        placements: The placements of its DTensor.
        num_shards: Ranks that share it.
        num_replicas: Ranks that hold the same shard.
        is_trained: Whether it has gradients.
        sharded_nbytes: Bytes of this rank's shard, padding included.
        gathered_nbytes: Bytes of the gathered parameter, padding included; ``None`` before the
            first gather of a tensor subclass.
        travels: How it is gathered: ``"in place"``, ``"packed"``, ``"permuted"``, ``"as a
            subclass"`` or ``"not at all"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    num_shards: int
    num_replicas: int
    is_trained: bool
    sharded_nbytes: int
    gathered_nbytes: int | None
    travels: str


@dataclass(frozen=True)
class Copy:
    """A copy in memory, besides the receipt of a message.

    Attributes:
        kind: ``"cast"``, ``"packed"``, ``"permuted"``, ``"padded"``, ``"moved"`` to another device,
            or ``"kept"``.
        parameters: The names of its parameters.
        nbytes: Bytes that are written each time.
        times: How often in a step.
        why: The reason, a sentence.
    """

    kind: str
    parameters: tuple[str, ...]
    nbytes: int
    times: int
    why: str


@dataclass(frozen=True)
class GroupExplanation:
    """The communication group of one ``fully_shard`` call.

    Attributes:
        name: Its name in the model; ``"(root)"`` for a root.
        modules: The classes of its modules.
        parameters: Its parameters.
        sharded_nbytes: Bytes of this rank's shards, padding included.
        gathered_nbytes: Bytes of the gathered parameters.
        traffic: Its traffic in one step.
        copies: Its packs, copies and casts in one step.
        reasons: The reasons, as sentences.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[ParameterExplanation, ...]
    sharded_nbytes: int
    gathered_nbytes: int | None
    traffic: StepTraffic
    copies: tuple[Copy, ...]
    reasons: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(prod(param.shape) for param in self.parameters)

    @property
    def copied_nbytes(self) -> int:
        """Bytes that it packs, copies and casts in one step."""
        return sum(copy.nbytes * copy.times for copy in self.copies)

    def without_names(self) -> GroupExplanation:
        """Return a copy without names, which is equal for groups that are alike."""
        parameters = (replace(param, name="") for param in self.parameters)
        copies = (replace(copy, parameters=()) for copy in self.copies)
        return replace(self, name="", parameters=tuple(parameters), copies=tuple(copies))


def explain_group(group: ParamGroup, modules: Mapping[nn.Module, str]) -> GroupExplanation:
    """Explain a step of a group, given the names of the modules in the model."""
    slots = {param: param.slots[0] for param in group.params}  # of tied parameters, the first one
    within = {param: modules.get(slot.module, "") for param, slot in slots.items()}
    names = {param: f"{within[param]}.{slot.name}".lstrip(".") for param, slot in slots.items()}
    views = (view for bucket in hybrid.part_buckets(group) for view in bucket.views)
    names |= {view: names[view.param] for view in views}
    gathered = [unsharded_nbytes(bucket) for bucket in group.buckets]
    return GroupExplanation(
        name=name_in(modules, group) or "(root)",
        modules=tuple(type(module).__name__.removeprefix("FSDP") for module in group.modules),
        parameters=tuple(
            _explain_param(bucket, index, names[param])
            for bucket in group.buckets
            for index, param in enumerate(bucket.params)
        ),
        sharded_nbytes=sum(map(sharded_nbytes, group.buckets)),
        gathered_nbytes=None if None in gathered else sum(filter(None, gathered)),
        traffic=traffic_of(group),
        copies=tuple(
            Copy(kind, tuple(names[param] for param in params), nbytes, times, why)
            for times, (kind, params, nbytes, why) in _copies(group)
            if nbytes
        ),
        reasons=tuple(_reasons(group, names)),
    )


def _explain_param(bucket: Bucket, index: int, name: str) -> ParameterExplanation:
    param = bucket.params[index]
    sharded, gathered = sharded_nbytes(bucket), unsharded_nbytes(bucket)
    num_shards, num_replicas = param.mesh.num_shards, param.mesh.num_replicas
    if isinstance(bucket, FlatBucket):
        numel = own = param.layout.flat.shard_numel
        if isinstance(bucket, hybrid.PartBucket):
            own = bucket.views[index].layout.flat.shard_numel
            num_shards, num_replicas = param.mesh.num_ranks, 1
        sharded = own * param.local.itemsize
        gathered = bucket.mesh.num_shards * numel * bucket.compute_dtype.itemsize
    dims = [getattr(placement, "dim", None) for placement in param.placement.sharded]
    return ParameterExplanation(
        name=name,
        shape=tuple(param.shape),
        dtype=short(param.local.dtype),
        placements=tuple("Replicate" if dim is None else f"Shard({dim})" for dim in dims),
        num_shards=num_shards,
        num_replicas=num_replicas,
        is_trained=param.sharded.requires_grad,
        sharded_nbytes=sharded,
        gathered_nbytes=gathered,
        travels=_travels(bucket, index),
    )


def _travels(bucket: Bucket, index: int) -> str:
    if not isinstance(bucket, FlatBucket):
        return "as a subclass"
    if bucket.mesh.num_shards == 1:
        return "not at all"
    if index < bucket.layout.num_direct:
        return "in place"
    return "packed" if bucket.params[index].layout.flat.gathers_in_place else "permuted"


# Copies of one step, and the reasons --------------------------------------------------------------

_Copy = tuple[str, Sequence[ShardedParam], int, str]
"""Kind, parameters, bytes and reason of a :class:`Copy`; without bytes, there is none."""


def _copies(group: ParamGroup) -> Iterator[tuple[int, _Copy]]:
    """Yield the copies of a step, and how often each happens."""
    in_backward, _ = residence_of(group)
    times = 2 if in_backward == "gathered" else 1
    for bucket in group.buckets:
        if isinstance(bucket, FlatBucket):
            yield from ((times, copy) for copy in _copies_of_gather(bucket, in_backward))
        if isinstance(bucket, hybrid.PartBucket):
            yield from ((1, copy) for copy in _copies_of_gather(bucket.parts, ""))
            why = "shards that the replicas have gathered are copied into one buffer"
            yield 1, ("kept", bucket.params, _numel(bucket.views) * bucket.dtype.itemsize, why)
    for reduction in reductions_of(group):
        if not reduction.is_alone:
            yield from ((1, copy) for copy in _copies_of_reduction(reduction))


def is_away(param: ShardedParam) -> bool:
    """Return whether its shard is kept on the CPU while compute is on a device."""
    return _torch.has_streams(param.mesh.device) and param.offload is not None


def _copies_of_gather(bucket: FlatBucket, in_backward: str) -> Iterator[_Copy]:
    layout, itemsize = bucket.layout, bucket.compute_dtype.itemsize
    stored, dtype = short(bucket.dtype), short(bucket.compute_dtype)
    in_order = sorted(zip(layout.order, bucket.params, strict=True), key=itemgetter(0))
    params = [param for _, param in in_order]
    if is_away(params[0]):
        why = "shards on the CPU are copied to the device of compute before each gather"
        yield "moved", params, sharded_nbytes(bucket), why
    encoded = sent_nbytes(bucket)
    if encoded is not None:
        why = f"shards are encoded{params[0].policy.wires()}, before each gather"
        yield "cast", params, sum(encoded), why
    elif stored != dtype and bucket.mesh.num_shards == 1:
        why = f"parameters stored as {stored} are cast to {dtype} for compute"
        yield "cast", params, layout.unsharded_numel * itemsize, why
    elif stored != dtype:
        why = f"shards of {stored} are cast to {dtype} before each gather, so fewer bytes travel"
        yield "cast", params, layout.shard_numel * itemsize, why
    ways: dict[str, list[ShardedParam]] = defaultdict(list)
    for index, param in enumerate(bucket.params):
        ways[_travels(bucket, index)].append(param)
    why = "not sharded on the outermost dim, so gathered shards are copied into the parameter"
    yield "permuted", ways["permuted"], _numel(ways["permuted"]) * itemsize, why
    packed = [param.layout.flat for param in ways["packed"]]
    numel = sum(param.num_shards * param.shard_numel for param in packed)
    why = "parameters too small for messages of their own share one, and are copied out of it"
    yield "packed", ways["packed"], numel * itemsize, why
    if in_backward == "regathered":
        count = num_neighbours(params[0].group)
        why = f"each of {count} neighbours keeps a part of all parameters from forward to backward"
        yield "kept", params, kept_nbytes(bucket), why


def _numel(params: Iterable[ShardedParam]) -> int:
    return sum(param.layout.flat.numel for param in params)


def _copies_of_reduction(of: ReductionPlan) -> Iterator[_Copy]:
    """Yield the copies of gradients before they are sent, and of the result."""
    dtype, itemsize, num_shards = short(of.dtype), of.dtype.itemsize, of.mesh.num_shards
    if of.is_encoded:
        why = f"gradients are encoded{of.members[0].policy.wires()}, before they are sent"
        yield "cast", of.members, num_shards * row_nbytes(of.members), why
        return
    if of.sent_dtype != of.grad_dtype:
        why = f"gradients are cast to {dtype}, in which they are summed"
        yield "cast", of.direct, _numel(of.direct) * itemsize, why
    permuted = [param for param in of.members if param.layout.flat.outer > 1]
    why = "not sharded on the outermost dim, so gradients are first laid out shard by shard"
    yield "permuted", permuted, _numel(permuted) * of.grad_dtype.itemsize, why
    packed = of.members[len(of.direct) :]
    padded = [param for param in packed if param in of.large]
    numel = num_shards * sum(param.layout.flat.shard_numel for param in padded)
    why = "rows do not divide evenly over the ranks, so the gradient is padded before it is sent"
    yield "padded", padded, numel * itemsize, why
    small = [param for param in packed if param not in of.large]
    why = "one flag for each gradient tells whether any rank computed it"
    if small:
        why = f"gradients too small for messages of their own share one, and {why}"
    yield "packed", small, (num_shards * of.packed_numel - numel) * itemsize, why
    if num_shards == 1:
        why = "parameters are not sharded, so gradients are copied into the all-reduce buffer"
        yield "moved", of.members, of.numel * itemsize, why
    if of.is_all_reduced and of.replica_dtype != of.dtype:
        wide = short(of.replica_dtype)
        why = f"sums of {dtype} are added over the replicas in {wide}, and rounded once"
        yield "cast", of.members, of.numel * (itemsize + of.replica_dtype.itemsize), why
    away, pairs = is_away(of.members[0]), zip(of.layouts, of.finals, strict=True)
    changed = [(layout, final) for layout, final in pairs if away or final != of.dtype]
    nbytes = sum(layout.shard_numel * final.itemsize for layout, final in changed)
    finals = sorted({short(final) for final in of.finals})
    if changed and len(finals) == 1:  # all at once, with padding and flags
        nbytes = of.numel * of.finals[0].itemsize
    place = " and copied to the CPU, where the optimizer is" if away else ""
    why = f"reduced gradients of {dtype} are turned into {', '.join(finals)}{place}"
    yield "moved" if away else "cast", of.members, nbytes, why


def _reasons(group: ParamGroup, names: Mapping[ShardedParam, str]) -> Iterator[str]:
    settings = group.settings
    yield residence_of(group)[1]
    for mesh in dict.fromkeys(bucket.mesh for bucket in group.buckets):
        buckets = [bucket for bucket in group.buckets if bucket.mesh == mesh]
        plain = [bucket for bucket in buckets if isinstance(bucket, FlatBucket)]
        dtypes = [short(each.dtype) for each in reductions_of(group) if each.mesh == mesh]
        if mesh.num_shards == 1:
            yield "one rank holds each parameter whole, so nothing is gathered"
        if len(plain) > 1:
            kinds = ", ".join(f"{short(b.dtype)} as {short(b.compute_dtype)}" for b in plain)
            yield f"parameters of different dtypes lie in {len(plain)} buffers: {kinds}"
        if len(dtypes) > 1:
            yield f"gradients are reduced in {', '.join(dtypes)}, each in a launch of its own"
        for bucket in buckets:
            if isinstance(bucket, ExtensionBucket):
                yield f"{names[bucket.param]} is a tensor subclass; {_sends(bucket)}"
        if isinstance(mesh, hybrid.PartMesh):
            what = "they gather it, and reduce its gradients, once in a step"
            yield f"{mesh.num_replicas} replicas split each shard: {what}"
        elif mesh.num_replicas > 1 and not settings.all_reduce_grads:
            yield "the all-reduce over the replicas is off: gradients are only reduced over shards"
        elif mesh.num_replicas > 1 and dtypes:
            yield f"gradients are also reduced over {mesh.num_replicas} replicas of the shards"
    if group.params and not settings.reduce_grads:
        yield "gradient sync is off: gradients stay unsharded on this rank until you turn it on"


def _sends(bucket: ExtensionBucket) -> str:
    if not has_extension(bucket.param.local):
        return "its inner tensors travel one by one"
    when = "at the first gather " if messages_of(bucket) is None else ""
    return f"its hook chooses {when}which tensors to send"
