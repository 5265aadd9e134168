"""``explain``: how a model is sharded, gathered and reduced, and why, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import prod

from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.arguments import check_int, check_module, check_type
from composable_shard.core.codec import has_extension
from composable_shard.core.extension import ExtensionBucket
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.storage import Bucket
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import CustomAllGather, CustomReduceScatter
from composable_shard.insight.advice import Advice, advice_on_groups
from composable_shard.insight.events import groups_in
from composable_shard.insight.group_steps import (
    Copy,
    GroupStep,
    ParameterExplanation,
    StepTraffic,
    Traffic,
    messages_of,
    short,
    total,
)
from composable_shard.insight.report import (
    Columns,
    Report,
    Section,
    Sentences,
    Table,
    count_text,
    names_text,
    nbytes_text,
)
from composable_shard.optim.blocks import LayoutSteps
from composable_shard.optim.flat import FlatSteps
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.parking import Parked, parkable
from composable_shard.train.weights.stream import PassCosts, costs_of

# The result of ``explain``: plain values, and their texts -----------------------------------------


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
        held_nbytes: The peak of the bytes of matrices in flight on this rank, besides the memory of
            the stock optimizers.
        imbalance: The most matrix work of a rank, divided by the mean of all ranks.
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
            f"matrices in flight occupy at most {nbytes_text(self.held_nbytes)} of this rank, "
            "in at most two buckets",
            f"the busiest rank has {self.imbalance:.3g} times the mean work",
        )


@dataclass(frozen=True)
class ParkingExplanation(Parked):
    """The memory of one device that ``parked`` would free now, in bytes on this rank.

    Gradients and states of optimizers count once the first step has made them.

    Attributes:
        device: Such as ``"cuda:0"``. Memory of the host is not parked.
    """

    device: str = ""


@dataclass(frozen=True)
class Explanation(Report):
    """How a model is sharded, gathered and reduced.

    Attributes:
        groups: The groups, each root before the groups in it.
        advice: Advice on needless costs.
        optimizer: A step of the optimizer, if one was given.
        parking: The memory of each device that ``parked`` would free now; not compared, since
            gradients and states come with the steps.
        weights_out: The costs of a pass of ``iter_full``, if ``bucket_bytes`` was given.
    """

    groups: tuple[GroupExplanation, ...]
    advice: tuple[Advice, ...]
    optimizer: OptimizerExplanation | None = None
    parking: tuple[ParkingExplanation, ...] = field(default=(), compare=False)
    weights_out: PassCosts | None = None

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank in one step, without the optimizer."""
        return total(group.traffic.total for group in self.groups)

    def sections(self) -> list[Section]:
        """Return tables of all groups, then for each kind of group its actions and the reasons."""
        runs = (list(run) for _, run in groupby(self.groups, GroupExplanation.without_names))
        alike = [(_title(run), run[0]) for run in runs]
        shown: list[Section] = [_overview(alike), self._communication(alike)]
        for title, group in alike:
            shown.append(Sentences(title, [*group.reasons, *map(_copy_text, group.copies)]))
        if self.optimizer is not None:
            shown += self.optimizer.sections()
            if any(memory.nbytes for memory in self.parking):
                shown.append(self._parking())
        if self.weights_out is not None:
            shown.append(Sentences("Weights out", _pass_texts(self.weights_out)))
        if self.advice:
            shown.append(Sentences("Worth a look", list(map(_advice_text, self.advice))))
        return shown

    def _communication(self, alike: list[tuple[str, GroupExplanation]]) -> Table:
        parts = StepTraffic().parts
        columns: Columns = {
            "group": str,
            **dict.fromkeys(parts, _traffic_text),
            **dict.fromkeys(("sent", "copied"), nbytes_text),
        }
        rows = [
            (title, *g.traffic.parts.values(), g.traffic.total.nbytes, g.copied_nbytes)
            for title, g in alike
        ]
        copied = sum(group.copied_nbytes for group in self.groups)
        rows.append(("all of them", *(None for _ in parts), self.traffic.nbytes, copied))
        title = "One step: launches x messages in each, bytes that this rank sends and copies"
        return Table(title, columns, rows)

    def _parking(self) -> Table:
        kinds = ("parameters", "gradients", "states", "buffers", "nbytes", "left")
        headings = ("freed" if kind == "nbytes" else kind for kind in kinds)
        rows = [(one.device, *(getattr(one, kind) for kind in kinds)) for one in self.parking]
        title = "Parking: bytes of this rank that parked() would free now"
        return Table(title, {"of": str, **dict.fromkeys(headings, nbytes_text)}, rows)


def _title(alike: list[GroupExplanation]) -> str:
    if len(alike) == 1:
        return alike[0].name
    return f"{alike[0].name} to {alike[-1].name} ({len(alike)} alike)"


def _overview(alike: list[tuple[str, GroupExplanation]]) -> Table:
    columns: Columns = {
        "group": str,
        "modules": names_text,
        "placements": partial(names_text, most=2),
        "parameters": str,
        "elements": count_text,
        **dict.fromkeys(("sharded", "gathered"), nbytes_text),
    }
    rows = []
    for title, group in alike:
        kinds = {(" ".join(p.placements), p.num_shards) for p in group.parameters}
        placements = [f"{placements} of {count}" for placements, count in sorted(kinds)]
        amounts = len(group.parameters), group.numel, group.sharded_nbytes, group.gathered_nbytes
        rows.append((title, group.modules, placements, *amounts))
    return Table("Groups: bytes of one of each, on this rank", columns, rows, num_words=3)


def _traffic_text(traffic: Traffic | None) -> str:
    if traffic is None:
        return ""
    if not traffic.launches:
        return "-"
    amount = nbytes_text(traffic.nbytes)
    if traffic.launches == 1:
        return f"1 x {traffic.messages}, {amount}"
    return f"{traffic.launches}, {traffic.messages} in all, {amount}"


def _copy_text(copy: Copy) -> str:
    times = "" if copy.times == 1 else f" {copy.times} times a step"
    names = names_text(copy.parameters)
    of_whom = f" ({names})" if names else ""
    return f"{copy.kind}{of_whom}, {nbytes_text(copy.nbytes)}{times}: {copy.why}"


def _pass_texts(costs: PassCosts) -> list[str]:
    texts = [
        f"iter_full() in buckets of {nbytes_text(costs.bucket_nbytes)}: {costs.num_buckets} of "
        f"them, {costs.launches} gathers of {costs.messages} messages in all",
        f"this rank sends {nbytes_text(costs.sent_nbytes)} and receives "
        f"{nbytes_text(costs.received_nbytes)}",
        f"beside the model at most {nbytes_text(costs.held_nbytes)} live at a time, if the caller "
        "drops each tensor",
    ]
    if costs.by_class:
        names = names_text(costs.by_class)
        texts.append(f"parameters that their class gathers in further collectives: {names}")
    return texts


def _advice_text(advice: Advice) -> str:
    about = names_text([name or "(root)" for name in advice.about])
    return f"{advice.kind}, {about}: {advice.problem}. Advice: {advice.remedy}."


# From the groups of a model to the result --------------------------------------------------------

ROOT = "(root)"


def explain(
    model: nn.Module, optimizer: Optimizer | None = None, *, bucket_bytes: int | None = None
) -> Explanation:
    """Explain what a sharded model keeps, sends, packs, copies and casts in a step, and why.

    The facts come from the layouts, policies and plans that the step will use, for one step in
    which each module is called once. Works before the first forward and under fake ranks, and
    changes nothing.

    Args:
        model: A sharded module, or one with sharded modules inside.
        optimizer: Adds its step: the number of tensors that it steps and, for ``with_layout``,
            its traffic, its memory and the balance of the work. Its states count among the memory
            that ``parked`` would free.
        bucket_bytes: Adds a pass of ``iter_full`` with such buckets: its launches, its traffic and
            its memory.

    Returns:
        An :class:`Explanation`: ``print`` it, call ``to_dict()``, or let rich or a notebook show
        it.

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
    groups = groups_in(model)
    for group in groups:
        if group.absence == ON_OTHER_RANKS:
            group.check_in_memory("to be explained")
    names = {module: name for name, module in model.named_modules()}
    steps = [GroupStep(group, _name_of(group, names), names) for group in groups]
    parking = parkable(model, [] if optimizer is None else [optimizer])
    return Explanation(
        tuple(map(_explain_group, steps)),
        advice_on_groups(model, steps),
        None if optimizer is None else explain_optimizer(optimizer),
        tuple(ParkingExplanation(**vars(memory), device=device) for device, memory in parking),
        None if bucket_bytes is None else costs_of(model, bucket_bytes),
    )


def _name_of(group: ParamGroup, names: Mapping[nn.Module, str]) -> str:
    inside = [names[module] for module in group.modules if module in names]
    return ", ".join(inside) or ROOT


def _explain_group(step: GroupStep) -> GroupExplanation:
    return GroupExplanation(
        name=step.name,
        modules=tuple(type(module).__name__.removeprefix("FSDP") for module in step.group.modules),
        parameters=tuple(explanation for _, explanation in step.params),
        sharded_nbytes=step.sharded_nbytes,
        gathered_nbytes=step.unsharded_nbytes,
        traffic=step.traffic(),
        copies=step.copies(),
        reasons=_reasons(step),
    )


def _reasons(step: GroupStep) -> tuple[str, ...]:
    if not step.group.params:
        return ("it has no parameters of its own, so it sends nothing",)
    reasons = [step.residence.why]
    for channel in step.channels:
        reasons += _reasons_of_mesh(step, channel)
    if not step.group.settings.reduce_grads:
        reasons.append("gradient sync is off: gradients stay unsharded on this rank until it is on")
    return tuple(reasons)


def _reasons_of_mesh(step: GroupStep, channel: Channel) -> list[str]:
    mesh, all_reduces = channel.mesh, step.group.settings.all_reduce_grads
    buckets = [bucket for bucket in step.group.buckets if bucket.mesh == mesh]
    plain = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
    kinds = ", ".join(f"{short(b.dtype)} as {short(b.compute_dtype)}" for b in plain)
    dtypes = [short(reduction.dtype) for reduction in step.reductions if reduction.mesh == mesh]
    subclasses = [_subclass_text(step, b) for b in buckets if isinstance(b, ExtensionBucket)]
    is_custom = isinstance(channel.all_gather, CustomAllGather) or isinstance(
        channel.reduce_scatter, CustomReduceScatter
    )
    reasons = {
        "one rank holds each parameter whole, so nothing is gathered": mesh.num_shards == 1,
        f"parameters of different dtypes lie in {len(plain)} buffers: {kinds}": len(plain) > 1,
        f"gradients are reduced in {', '.join(dtypes)}, each in a launch of its own": (
            len(dtypes) > 1
        ),
        **dict.fromkeys(subclasses, True),
        "the all-reduce over the replicas is off: gradients wait for it": (
            mesh.num_replicas > 1 and not all_reduces
        ),
        f"{mesh.num_replicas} replicas hold the same shards, so the reduced gradients of this rank "
        "are reduced over them as well": mesh.num_replicas > 1 and all_reduces and bool(dtypes),
        "custom communication copies all inputs, and all outputs, into one tensor": is_custom,
    }
    return [text for text, is_so in reasons.items() if is_so]


def _subclass_text(step: GroupStep, bucket: ExtensionBucket) -> str:
    who = f"{step.names_of([bucket.param])[0]} is a tensor subclass"
    if not has_extension(bucket.param.local):
        return f"{who}; its inner tensors travel one by one"
    if messages_of(bucket) is None:
        return f"{who}; its hook chooses at the first gather which tensors to send"
    return f"{who}; its hook chooses which tensors to send"


# The step of an optimizer -------------------------------------------------------------------------


def explain_optimizer(optimizer: Optimizer) -> OptimizerExplanation:
    """Explain the tensors, traffic and memory of a step of an optimizer. Collective: none."""
    if isinstance(optimizer, LayoutOptimizer):
        return explain_layouts(optimizer.plan())
    layout = "flat" if isinstance(optimizer, FlatSteps) else "stock"
    trained = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    nums = optimizer.num_tensors() if isinstance(optimizer, FlatSteps) else list(map(len, trained))
    groups = [
        OptimizerGroupExplanation(layout, len(some), sum(map(Tensor.numel, some)), num, Traffic())
        for some, num in zip(trained, nums, strict=True)
    ]
    return OptimizerExplanation(type(optimizer).__name__, tuple(groups))


def explain_layouts(steps: LayoutSteps) -> OptimizerExplanation:
    """Explain a step of an optimizer of whole matrices."""
    groups = []
    for group in steps.groups:
        sent = [message for bucket in group.buckets for message in bucket.sent]
        traffic = total(Traffic(1, len(message.to), message.nbytes) for message in sent)
        facts = group.layout, group.num_params, group.numel, group.num_tensors
        groups.append(OptimizerGroupExplanation(*facts, traffic))
    return OptimizerExplanation("with_layout", tuple(groups), steps.most_held, steps.imbalance)
