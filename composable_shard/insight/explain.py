"""What sharding does to a model, told before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import ParamLayout
from composable_shard.core.param import ShardedParam
from composable_shard.insight.group_plan import (
    GatherPlan,
    GroupPlan,
    MeshPlan,
    Names,
    SubclassPlan,
    full_name,
    read_group,
)
from composable_shard.insight.group_traffic import (
    Copy,
    StepTraffic,
    Traffic,
    short,
    step_copies,
    step_traffic,
    total,
)
from composable_shard.insight.report import (
    UNKNOWN,
    Report,
    Section,
    Sentences,
    Table,
    count_text,
    names_text,
    nbytes_text,
)
from composable_shard.module import group_of

# Which modules of a model are repeated: those that are best sharded one by one --------------------


def repeated_blocks(model: nn.Module) -> set[nn.Module]:
    """Return the outermost modules that stand several times in a list, with parameters.

    >>> model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    >>> len(repeated_blocks(model))
    3
    """
    found: set[nn.Module] = set()
    _collect(model, found)
    return found


def is_repeated_block(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a policy for ``apply_fully_shard`` that picks them."""
    blocks = repeated_blocks(model)
    return lambda module: module in blocks


def _collect(module: nn.Module, found: set[nn.Module]) -> None:
    children = list(module.children())
    kinds = Counter(type(child) for child in children)
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in children:
        has_params = next(child.parameters(), None) is not None
        runs = type(child).forward is not nn.Module.forward
        if is_list and kinds[type(child)] > 1 and has_params and runs:
            found.add(child)
        else:
            _collect(child, found)


# The result of ``explain``: plain values, and how they are shown ----------------------------------


@dataclass(frozen=True)
class ParameterExplanation:
    """One parameter.

    Attributes:
        name: Its name in the model.
        shape: Its global shape.
        dtype: In which it is stored.
        placements: Those of its DTensor.
        num_shards: Ranks that share it.
        num_replicas: Ranks that hold the same shard.
        is_trained: Whether it has gradients.
        sharded_nbytes: Bytes of this rank's shard, padding included.
        gathered_nbytes: Bytes of the gathered parameter, padding included; ``None`` for a tensor
            subclass whose hook has not said it yet.
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
class GroupExplanation:
    """One communication group, that of one ``fully_shard`` call.

    Attributes:
        name: Its name in the model; that of a root is ``"(root)"``.
        modules: The classes of its modules.
        parameters: What it holds.
        sharded_nbytes: Bytes of this rank's shards, padding included.
        gathered_nbytes: Bytes of the gathered parameters.
        traffic: What it sends in one step.
        copies: What it packs, copies and casts in one step.
        reasons: Why it does what it does, sentences.
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

    def is_like(self, other: GroupExplanation) -> bool:
        """Tell whether two groups differ in names alone."""
        return self.without_names() == other.without_names()

    def without_names(self) -> object:
        """Return what groups that are alike have in common."""
        return (
            [replace(param, name=self._name_within(param.name)) for param in self.parameters],
            [(copy.kind, copy.nbytes, copy.times, copy.why) for copy in self.copies],
            replace(self, name="", parameters=(), copies=()),
        )

    def _name_within(self, name: str) -> str:
        """Return the name of a parameter in the module of this group that it is in."""
        for module in self.name.split(", "):
            if name.startswith(f"{module}."):
                return name.removeprefix(f"{module}.")
        return name


@dataclass(frozen=True)
class Explanation(Report):
    """What sharding does to a model.

    Attributes:
        groups: The groups, roots before what lies in them.
        advice: What to look at.
    """

    groups: tuple[GroupExplanation, ...]
    advice: tuple[Advice, ...]

    @property
    def traffic(self) -> Traffic:
        """What this rank sends in one step."""
        return total(group.traffic.total for group in self.groups)

    def sections(self) -> list[Section]:
        """Return the table of groups, then for each kind of group what is done and why."""
        alike = _runs(self.groups)
        shown: list[Section] = [self._overview(alike), self._communication(alike)]
        for groups in alike:
            shown.append(Sentences(_title(groups), _told(groups[0])))
        if self.advice:
            shown.append(Sentences("Worth a look", tuple(map(_advice_text, self.advice))))
        return shown

    def _overview(self, alike: list[list[GroupExplanation]]) -> Table:
        columns = (
            "group",
            "modules",
            "placements",
            "parameters",
            "elements",
            "sharded",
            "gathered",
        )
        rows = [
            (
                _title(groups),
                names_text(groups[0].modules),
                names_text(_placements(groups[0]), most=2),
                str(len(groups[0].parameters)),
                count_text(groups[0].numel),
                nbytes_text(groups[0].sharded_nbytes),
                nbytes_text(groups[0].gathered_nbytes),
            )
            for groups in alike
        ]
        title = "Groups: bytes of one of each, on this rank"
        return Table(title, columns, tuple(rows), num_words=3)

    def _communication(self, alike: list[list[GroupExplanation]]) -> Table:
        rows = []
        for groups in alike:
            traffic = groups[0].traffic
            cells = map(_traffic_text, traffic.parts.values())
            sent, copied = nbytes_text(traffic.total.nbytes), nbytes_text(groups[0].copied_nbytes)
            rows.append((_title(groups), *cells, sent, copied))
        copied = nbytes_text(sum(group.copied_nbytes for group in self.groups))
        parts = self.groups[0].traffic.parts
        blanks = [""] * len(parts)
        rows.append(("all of them", *blanks, nbytes_text(self.traffic.nbytes), copied))
        title = "One step: launches x messages in each, bytes that this rank sends and copies"
        return Table(title, ("group", *parts, "sent", "copied"), tuple(rows))


def _runs(groups: tuple[GroupExplanation, ...]) -> list[list[GroupExplanation]]:
    """Put neighbours that differ in names alone together."""
    runs: list[list[GroupExplanation]] = []
    for group in groups:
        if runs and runs[-1][-1].is_like(group):
            runs[-1].append(group)
        else:
            runs.append([group])
    return runs


def _title(groups: list[GroupExplanation]) -> str:
    if len(groups) == 1:
        return groups[0].name
    return f"{groups[0].name} to {groups[-1].name} ({len(groups)} alike)"


def _placements(group: GroupExplanation) -> tuple[str, ...]:
    kinds = {(" ".join(p.placements), p.num_shards) for p in group.parameters}
    return tuple(f"{placements} of {count}" for placements, count in sorted(kinds))


def _traffic_text(traffic: Traffic) -> str:
    if not traffic.launches:
        return "-"
    amount = UNKNOWN if traffic.nbytes is None else nbytes_text(traffic.nbytes)
    if traffic.launches == 1:
        return f"1 x {traffic.messages}, {amount}"
    return f"{traffic.launches}, {traffic.messages} in all, {amount}"


def _told(group: GroupExplanation) -> tuple[str, ...]:
    return (*group.reasons, *map(_copy_text, group.copies))


def _copy_text(copy: Copy) -> str:
    times = "" if copy.times == 1 else f" {copy.times} times a step"
    names = names_text(copy.parameters)
    of_whom = f" ({names})" if names else ""
    return f"{copy.kind}{of_whom}, {nbytes_text(copy.nbytes)}{times}: {copy.why}"


def _advice_text(advice: Advice) -> str:
    about = names_text(tuple(name or "(root)" for name in advice.about))
    return f"{advice.kind}, {about}: {advice.problem}. Advice: {advice.remedy}."


# What about a sharded model costs more than it has to, and what to do about it --------------------

GIANT_SHARE = 0.5
"""A root group with more than this part of all parameters gathers most of the model at once."""

BUFFERS_SHARE = 0.1
BUFFERS_NBYTES = 1 << 20
"""Buffers of more bytes, and of more than that part of a rank's shards, are worth a word."""


@dataclass(frozen=True)
class Advice:
    """Something to look at.

    Attributes:
        kind: Which, one word or two; to filter by.
        about: The group, parameters or buffers.
        problem: What is so, with numbers.
        remedy: What to do.
    """

    kind: str
    about: tuple[str, ...]
    problem: str
    remedy: str


def advice_on_groups(
    model: nn.Module, groups: Sequence[tuple[ParamGroup, GroupPlan]]
) -> tuple[Advice, ...]:
    """Return what is to say about the groups of a model, the weightiest first."""
    return (
        *_giant_root(groups),
        *_small_groups(groups),
        *_uneven_parameters(groups),
        *_empty_ranks(groups),
        *_narrow_sums(groups),
        *_unsharded_parameters(model, groups),
        *_large_buffers(model, groups),
    )


def _giant_root(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    whole = sum(plan.unsharded_nbytes or 0 for _, plan in groups)
    for group, plan in groups:
        nbytes = plan.unsharded_nbytes or 0
        if group is not group.context.root or nbytes <= GIANT_SHARE * whole:
            continue
        blocks = [block for top in group.modules for block in repeated_blocks(top)]
        if not blocks:
            continue
        kind, count = Counter(_shown_class(block) for block in blocks).most_common(1)[0]
        yield Advice(
            "giant root",
            (plan.name,),
            f"the root group gathers {nbytes_text(nbytes)} at once, {nbytes / whole:.0%} of the "
            "parameters, and nothing overlaps with that",
            f"apply fully_shard to each {kind} ({count} of them) before the root, or "
            f"apply_fully_shard(model, {kind})",
        )


def _shown_class(module: nn.Module) -> str:
    return type(module).__name__


def _small_groups(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    small = [
        plan
        for group, plan in groups
        if group is not group.context.root and group.params and _is_packed_whole(plan)
    ]
    if small:
        largest = max(plan.unsharded_nbytes or 0 for plan in small)
        yield Advice(
            "small group",
            tuple(plan.name for plan in small),
            f"{_count(len(small), 'group')} of at most {nbytes_text(largest)} each: a gather of so "
            "few bytes is all latency",
            "shard the module around instead, or several in one list: fully_shard([a, b])",
        )


def _is_packed_whole(plan: GroupPlan) -> bool:
    """Tell whether nothing in a group is worth a message of its own."""
    return (
        not any(mesh.subclasses or mesh.num_shards == 1 for mesh in plan.meshes if mesh.gathers)
        and bool(plan.buckets)
        and not any(bucket.layout.direct or bucket.layout.permuted for bucket in plan.buckets)
    )


def _layouts(plan: GroupPlan) -> Iterator[tuple[str, ParamLayout, int, bool]]:
    """Yield name, layout, bytes of an element and whether it has a message of its own."""
    for bucket in plan.buckets:
        for index, (name, layout) in enumerate(
            zip(bucket.names, bucket.layout.params, strict=True)
        ):
            yield name, layout, bucket.dtype.itemsize, index not in bucket.layout.packed


def _uneven_parameters(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    for _, plan in groups:
        for name, layout, itemsize, travels_alone in _layouts(plan):
            if not travels_alone or layout.is_even or layout.rows < layout.num_shards:
                continue
            nbytes = (layout.gathered_numel - layout.numel) * itemsize
            rows = layout.rows_per_shard * layout.num_shards
            yield Advice(
                "uneven rows",
                (name,),
                f"{layout.rows} rows over {layout.num_shards} ranks are padded by "
                f"{nbytes_text(nbytes)}, and the whole gradient is copied to pad it",
                f"make it {rows} rows, or shard another dim by shard_placement_fn",
            )


def _empty_ranks(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    for _, plan in groups:
        found = [
            (name, layout, itemsize)
            for name, layout, itemsize, _ in _layouts(plan)
            if layout.numel
            and layout.num_full_shards + (layout.num_remaining_rows > 0) < layout.num_shards
        ]
        if not found:
            continue
        fewest = min(layout.rows for _, layout, _ in found)
        nbytes = sum((one.gathered_numel - one.numel) * itemsize for _, one, itemsize in found)
        longer = [name for name, one, _ in found if max(one.shape) >= one.num_shards > one.rows]
        remedy = "nothing, if they are small: they share one message"
        if longer:
            remedy = f"shard a longer dim of {names_text(tuple(longer))} by shard_placement_fn"
        yield Advice(
            "empty ranks",
            tuple(name for name, _, _ in found),
            f"{_count(len(found), 'parameter')} of {plan.name or 'the root'} with as few as "
            f"{_count(fewest, 'row')} for {found[0][1].num_shards} ranks: some ranks hold none, "
            f"and gathering pads by {nbytes_text(nbytes)}",
            remedy,
        )


def _narrow_sums(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    narrow = {
        (plan.name, one.dtype, mesh.num_shards * mesh.num_replicas)
        for _, plan in groups
        for mesh in plan.meshes
        for one in mesh.reductions
        if one.dtype.itemsize < torch.float32.itemsize and mesh.num_shards * mesh.num_replicas > 2
    }
    if narrow:
        dtypes = sorted({str(dtype).removeprefix("torch.") for _, dtype, _ in narrow})
        most = max(count for _, _, count in narrow)
        yield Advice(
            "narrow sums",
            tuple(sorted(name for name, _, _ in narrow)),
            f"gradients of {most} ranks are summed in {', '.join(dtypes)}, rounded as they go",
            "MixedPrecisionPolicy(reduce_dtype=torch.float32), for twice the bytes of reductions",
        )


def _unsharded_parameters(
    model: nn.Module, groups: Sequence[tuple[ParamGroup, GroupPlan]]
) -> Iterator[Advice]:
    ours = {id(param.sharded) for group, _ in groups for param in group.params}
    ours |= {id(param.unsharded) for group, _ in groups for param in group.params}
    others = {n: p for n, p in model.named_parameters() if id(p) not in ours}
    for trained in (True, False):
        some = {n: p for n, p in others.items() if p.requires_grad is trained}
        if not some:
            continue
        nbytes = sum(param.numel() * param.itemsize for param in some.values())
        problem = f"{_count(len(some), 'parameter')} of {nbytes_text(nbytes)} whole on every rank"
        if trained:
            problem += ", whose gradients no rank hears from the others"
        yield Advice(
            "unsharded parameters",
            tuple(some),
            problem,
            "apply fully_shard to a module around them"
            + (", or reduce their gradients yourself" if trained else ""),
        )


def _large_buffers(
    model: nn.Module, groups: Sequence[tuple[ParamGroup, GroupPlan]]
) -> Iterator[Advice]:
    buffers = dict(model.named_buffers())
    nbytes = sum(buffer.numel() * buffer.itemsize for buffer in buffers.values())
    shards = sum(plan.sharded_nbytes for _, plan in groups)
    if nbytes > max(BUFFERS_NBYTES, BUFFERS_SHARE * shards):
        yield Advice(
            "unsharded buffers",
            tuple(buffers),
            f"{_count(len(buffers), 'buffer')} of {nbytes_text(nbytes)} whole on every rank",
            "compute them when they are needed, share one among modules, or narrow their dtype",
        )


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# What sharding does to a model, told before it runs -----------------------------------------------

ROOT = "(root)"


def explain(model: nn.Module) -> Explanation:
    """Tell what sharding does to a model: what it keeps, sends, packs, copies and casts, and why.

    Read off the layouts, policies and plans that the step will use, for one step in which each
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
        sharded = layout.shard_numel * unit.stored_dtype.itemsize
        gathered = layout.gathered_numel * unit.dtype.itemsize
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
            if isinstance(unit, GatherPlan) and name in unit.names:
                return unit, unit.names.index(name)
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
        kinds = ", ".join(f"{short(b.stored_dtype)} as {short(b.dtype)}" for b in buckets)
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
