"""What sharding does to a model, told before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from torch import nn
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_int, check_module, check_type
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.storage import ShardedParam
from composable_shard.insight.advice import Advice, advice_on_groups
from composable_shard.insight.group_plan import (
    GroupPlan,
    MeshPlan,
    Names,
    ParamPlan,
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
from composable_shard.insight.optimizer_steps import OptimizerExplanation, explain_optimizer
from composable_shard.insight.parking import ParkingExplanation, explain_parking, parking_table
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
from composable_shard.train.weights.stream import Asked, PassCosts, costs_of

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
        optimizer: What a step of the optimizer does, if one was given.
        parking: What ``parked`` would free now, of the memory of each device; not compared, since
            gradients and states come with the steps.
        weights_out: What a pass of ``iter_full`` takes, if ``bucket_bytes`` were given.
    """

    groups: tuple[GroupExplanation, ...]
    advice: tuple[Advice, ...]
    optimizer: OptimizerExplanation | None = None
    parking: tuple[ParkingExplanation, ...] = field(default=(), compare=False)
    weights_out: PassCosts | None = None

    @property
    def traffic(self) -> Traffic:
        """What this rank sends in one step, without the optimizer."""
        return total(group.traffic.total for group in self.groups)

    def sections(self) -> list[Section]:
        """Return the table of groups, then for each kind of group what is done and why."""
        alike = _runs(self.groups)
        shown: list[Section] = [self._overview(alike), self._communication(alike)]
        for groups in alike:
            shown.append(Sentences(_title(groups), _told(groups[0])))
        if self.optimizer is not None:
            shown += self.optimizer.sections()
            if any(one.nbytes for one in self.parking):
                shown.append(parking_table(self.parking))
        if self.weights_out is not None:
            shown.append(Sentences("Weights out", _told_of_pass(self.weights_out)))
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


def _told_of_pass(costs: PassCosts) -> tuple[str, ...]:
    told = [
        f"iter_full() in buckets of {nbytes_text(costs.bucket_nbytes)}: {costs.num_buckets} of "
        f"them, {costs.launches} gathers of {costs.messages} messages in all",
        f"this rank sends {nbytes_text(costs.sent_nbytes)} and receives "
        f"{nbytes_text(costs.received_nbytes)}",
        f"beside the model at most {nbytes_text(costs.held_nbytes)} live at a time, if each tensor "
        "is let go of",
    ]
    if costs.by_class:
        names = names_text(costs.by_class)
        told.append(f"only their class makes whole, by gathers besides: {names}")
    return tuple(told)


def _advice_text(advice: Advice) -> str:
    about = names_text(tuple(name or "(root)" for name in advice.about))
    return f"{advice.kind}, {about}: {advice.problem}. Advice: {advice.remedy}."


# What sharding does to a model, told before it runs -----------------------------------------------

ROOT = "(root)"


def explain(
    model: nn.Module, optimizer: Optimizer | None = None, *, bucket_bytes: int | None = None
) -> Explanation:
    """Tell what sharding does to a model: what it keeps, sends, packs, copies and casts, and why.

    Read off the layouts, policies and plans that the step will use, for one step in which each
    module is called once. Works before the first forward and under fake ranks, and changes nothing.

    Args:
        model: A sharded module, or one with sharded modules inside.
        optimizer: Tells of its step, too: how many tensors it steps, and of one that
            ``with_layout`` made what it sends, what that occupies, and how even the work is. Its
            states are among what ``parked`` would free.
        bucket_bytes: Tells of a pass of ``iter_full`` with such buckets, too: what it launches,
            sends, receives and holds.

    Returns:
        An :class:`Explanation`: ``print`` it, ask it for ``to_dict()``, or let rich or a notebook
        show it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If nothing in the module is sharded, or ``bucket_bytes`` is not positive.
        ShardError: On a rank that ``move`` has left without the model.

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
    check_module("model", model)
    is_optimizer = optimizer is None or isinstance(optimizer, Optimizer)
    check_type("optimizer", optimizer, is_optimizer, "a torch.optim.Optimizer or None")
    if bucket_bytes is not None:
        check_int("bucket_bytes", bucket_bytes, 1)
    names = {module: name for name, module in model.named_modules()}
    groups = list(dict.fromkeys(group for m in names if (group := group_of(m)) is not None))
    if not groups:
        raise ValueError(
            f"Expected sharded modules in {type(model).__name__}, got none; apply fully_shard to it"
        )
    for group in groups:
        if group.absence == ON_OTHER_RANKS:
            group.check_awake("to be explained")
    read = [(group, read_group(group, _name_of(group, names), names)) for group in groups]
    return Explanation(
        tuple(_explain_group(group, plan, names) for group, plan in read),
        advice_on_groups(model, read),
        None if optimizer is None else explain_optimizer(optimizer),
        explain_parking(model, optimizer),
        None if bucket_bytes is None else costs_of(model, Asked(), bucket_bytes),
    )


def _name_of(group: ParamGroup, names: Names) -> str:
    inside = [names[module] for module in group.modules if module in names]
    return ", ".join(inside) or ROOT


def _explain_group(group: ParamGroup, plan: GroupPlan, names: Names) -> GroupExplanation:
    params = {param.name: param for param in plan.params}
    return GroupExplanation(
        name=plan.name,
        modules=tuple(type(module).__name__.removeprefix("FSDP") for module in group.modules),
        parameters=tuple(
            _explain_param(param, params[full_name(param, names)]) for param in group.params
        ),
        sharded_nbytes=plan.sharded_nbytes,
        gathered_nbytes=plan.unsharded_nbytes,
        traffic=step_traffic(plan),
        copies=step_copies(plan),
        reasons=_reasons(plan),
    )


def _explain_param(param: ShardedParam, plan: ParamPlan) -> ParameterExplanation:
    with _torch.without_overrides():
        is_trained = param.sharded.requires_grad
    return ParameterExplanation(
        name=plan.name,
        shape=tuple(param.shape),
        dtype=short(param.local.dtype),
        placements=tuple(_placement_text(p) for p in param.placement.sharded),
        num_shards=param.mesh.num_shards,
        num_replicas=param.mesh.num_replicas,
        is_trained=is_trained,
        sharded_nbytes=plan.sharded_nbytes,
        gathered_nbytes=plan.gathered_nbytes,
        travels=plan.travels,
    )


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
