"""``explain``: how a model is sharded, gathered and reduced, why, and advice on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.arguments import check_module, check_type
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.insight.events import groups_in
from composable_shard.insight.group_steps import (
    Copy,
    GroupExplanation,
    Traffic,
    explain_group,
    reductions_of,
    short,
    total,
)
from composable_shard.insight.report import (
    Report,
    Section,
    Sentences,
    Table,
    count_text,
    counted,
    names_text,
    nbytes_text,
)
from composable_shard.optim.flat import FlatSteps
from composable_shard.optim.layouts import LayoutOptimizer

# The result of ``explain``: plain values, and their texts -----------------------------------------


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        kind: Its kind in one word or two, to filter by.
        about: The group, parameters or buffers.
        problem: The problem, with numbers.
        remedy: The remedy.
    """

    kind: str
    about: tuple[str, ...]
    problem: str
    remedy: str


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
        imbalance: The most matrix work of a rank, divided by the mean of all ranks.
    """

    name: str
    groups: tuple[OptimizerGroupExplanation, ...]
    imbalance: float = 1.0

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank in one step."""
        return total(group.traffic for group in self.groups)

    def sections(self) -> list[Section]:
        """Return the table of parameter groups, then some sentences."""
        rows = []
        for i, group in enumerate(self.groups):
            numel, traffic = count_text(group.numel), group.traffic
            sent = traffic.launches, traffic.messages, nbytes_text(traffic.nbytes)
            rows.append((i, group.layout, group.num_parameters, numel, group.num_tensors, *sent))
        counts = ("parameters", "elements", "tensors", "launches", "messages", "sent")
        title = f"A step of {self.name}: tensors to step, messages and bytes to send, on this rank"
        sentences = []
        if any(group.layout == "flat" for group in self.groups):
            sentences = ["adjacent shards are stepped as one tensor, and no messages are sent"]
        elif self.traffic.launches:
            sentences = [f"work of the busiest rank / mean work of all ranks: {self.imbalance:.3g}"]
        told = [Sentences("Optimizer", sentences)] if sentences else []
        return [Table(title, ("parameter group", "layout", *counts), rows, num_words=2), *told]


@dataclass(frozen=True)
class Explanation(Report):
    """How a model is sharded, gathered and reduced.

    Attributes:
        groups: The groups, each root before the groups in it.
        advice: Advice on needless costs.
        optimizer: A step of the optimizer, if one was given.
    """

    groups: tuple[GroupExplanation, ...]
    advice: tuple[Advice, ...]
    optimizer: OptimizerExplanation | None = None

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
        if self.advice:
            shown.append(Sentences("Advice", list(map(_advice_text, self.advice))))
        return shown

    def _communication(self, alike: list[tuple[str, GroupExplanation]]) -> Table:
        rows = []
        for title, group in alike:
            parts, sent = group.traffic.parts, nbytes_text(group.traffic.total.nbytes)
            copied = nbytes_text(group.copied_nbytes)
            rows.append((title, *map(_traffic_text, parts.values()), sent, copied))
        copied = nbytes_text(sum(group.copied_nbytes for group in self.groups))
        rows.append(("all groups", *("" for _ in parts), nbytes_text(self.traffic.nbytes), copied))
        title = "One step on this rank: launches x messages per launch, bytes sent, bytes copied"
        return Table(title, ("group", *parts, "sent", "copied"), rows)


def _title(alike: list[GroupExplanation]) -> str:
    if len(alike) == 1:
        return alike[0].name
    return f"{alike[0].name} to {alike[-1].name} ({len(alike)} alike)"


def _overview(alike: list[tuple[str, GroupExplanation]]) -> Table:
    rows = []
    for title, group in alike:
        kinds = {(" ".join(p.placements), p.num_shards) for p in group.parameters}
        placements = [f"{placements} of {count}" for placements, count in sorted(kinds)]
        words = title, names_text(group.modules), names_text(placements, most=2)
        nbytes = map(nbytes_text, (group.sharded_nbytes, group.gathered_nbytes))
        rows.append((*words, len(group.parameters), count_text(group.numel), *nbytes))
    headings = ("group", "modules", "placements", "parameters", "elements", "sharded", "gathered")
    return Table("Groups: the bytes of one group on this rank", headings, rows, num_words=3)


def _traffic_text(traffic: Traffic) -> str:
    if not traffic.launches:
        return "-"
    count = f"{traffic.launches} with {traffic.messages} messages"
    if traffic.launches == 1:
        count = f"1 x {traffic.messages}"
    return f"{count}, {nbytes_text(traffic.nbytes)}"


def _copy_text(copy: Copy) -> str:
    times = "" if copy.times == 1 else f", {copy.times} times a step"
    names = names_text(copy.parameters)
    of_whom = f" ({names})" if names else ""
    return f"{copy.kind}{of_whom}, {nbytes_text(copy.nbytes)}{times}: {copy.why}"


def _advice_text(advice: Advice) -> str:
    about = names_text([name or "(root)" for name in advice.about])
    return f"{advice.kind}, {about}: {advice.problem}. Advice: {advice.remedy}."


# From the groups of a model to the result --------------------------------------------------------


def explain(model: nn.Module, optimizer: Optimizer | None = None) -> Explanation:
    """Explain what a sharded model keeps, sends, packs, copies and casts in a step, and why.

    The facts come from the layouts, policies and plans that the step will use, for one step in
    which each module is called once. Works before the first forward and under fake ranks, and
    changes nothing.

    Args:
        model: A sharded module, or one with sharded modules inside.
        optimizer: Adds its step: the number of tensors that it steps and, for ``with_layout``,
            its traffic and the balance of the work.

    Returns:
        An :class:`Explanation`: ``print`` it, call ``to_dict()``, or let rich or a notebook show
        it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If nothing in the module is sharded.
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
    groups = groups_in(model)
    for group in groups:
        if group.why_absent == ON_OTHER_RANKS:
            group.check_in_memory("to be explained")
    names = {module: name for name, module in model.named_modules()}
    explained = tuple(explain_group(group, names) for group in groups)
    return Explanation(
        explained,
        tuple(advice_on(model, list(zip(groups, explained, strict=True)))),
        None if optimizer is None else explain_optimizer(optimizer),
    )


# The step of an optimizer -------------------------------------------------------------------------


def explain_optimizer(optimizer: Optimizer) -> OptimizerExplanation:
    """Explain the tensors and the traffic of a step of an optimizer. Collective: none."""
    if isinstance(optimizer, LayoutOptimizer):
        groups = [
            OptimizerGroupExplanation(*group[:-1], total(Traffic(*sent) for sent in group.sent))
            for group in optimizer.plan()
        ]
        return OptimizerExplanation("with_layout", tuple(groups), optimizer.imbalance())
    layout = "flat" if isinstance(optimizer, FlatSteps) else "stock"
    trained = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    nums = optimizer.num_tensors() if isinstance(optimizer, FlatSteps) else list(map(len, trained))
    groups = [
        OptimizerGroupExplanation(layout, len(some), sum(map(Tensor.numel, some)), num, Traffic())
        for some, num in zip(trained, nums, strict=True)
    ]
    return OptimizerExplanation(type(optimizer).__name__, tuple(groups))


# Repeated modules, which are best sharded one by one ----------------------------------------------


def repeated_blocks(module: nn.Module) -> set[nn.Module]:
    """Return the outermost modules with parameters that a list holds several times.

    >>> model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    >>> len(repeated_blocks(model))
    3
    """
    found: set[nn.Module] = set()
    kinds = Counter(map(type, module.children()))
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in module.children():
        has_params = next(child.parameters(), None) is not None
        runs = type(child).forward is not nn.Module.forward
        if is_list and kinds[type(child)] > 1 and has_params and runs:
            found.add(child)
        else:
            found |= repeated_blocks(child)
    return found


def is_repeated_block(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a policy for ``apply_fully_shard`` that picks the repeated blocks."""
    blocks = repeated_blocks(model) or {model}  # a model without any is one group
    return lambda module: module in blocks


# Advice on the groups of a model ------------------------------------------------------------------

GIANT_SHARE = 0.5
"""A root group with more than this share of all parameters gathers most of the model at once."""

BUFFERS_SHARE = 0.1
BUFFERS_NBYTES = 1 << 20
"""Buffers of more bytes, and of more than this share of a rank's shards, are worth advice."""


Explained = Sequence[tuple[ParamGroup, GroupExplanation]]
"""The groups of a model, each with its explanation."""


def advice_on(model: nn.Module, explained: Explained) -> Iterator[Advice]:
    """Yield the advice on a model, the most important first."""
    yield from _on_giant_root(explained)
    yield from _on_small_groups(explained)
    yield from _on_uneven_rows(explained)
    yield from _on_narrow_sums(explained)
    yield from _on_unsharded(model, explained)


def _on_giant_root(explained: Explained) -> Iterator[Advice]:
    whole = sum(explanation.gathered_nbytes or 0 for _, explanation in explained)
    for group, explanation in explained:
        nbytes = explanation.gathered_nbytes or 0
        blocks = [block for top in group.modules for block in repeated_blocks(top)]
        if group is group.tree.root and nbytes > GIANT_SHARE * whole and blocks:
            kind, count = Counter(type(block).__name__ for block in blocks).most_common(1)[0]
            share = f"{nbytes_text(nbytes)}, {nbytes / whole:.0%} of the parameters"
            problem = f"the root group gathers {share}, at once, and nothing overlaps with it"
            remedy = f"shard each {kind} ({count} of them) first: apply_fully_shard(model, {kind})"
            yield Advice("giant root", (explanation.name,), problem, remedy)


def _on_small_groups(explained: Explained) -> Iterator[Advice]:
    small = {
        explanation.name: explanation.gathered_nbytes or 0
        for group, explanation in explained
        if group is not group.tree.root
        and {param.travels for param in explanation.parameters} == {"packed"}
    }
    if small:
        most = nbytes_text(max(small.values()))
        problem = f"{counted(len(small), 'group')} of at most {most}: gathers are mostly latency"
        remedy = "shard the module around instead, or several in one list: fully_shard([a, b])"
        yield Advice("small group", tuple(small), problem, remedy)


def _on_uneven_rows(explained: Explained) -> Iterator[Advice]:
    for group, explanation in explained:
        params = (param for bucket in group.buckets for param in bucket.params)
        for param, told in zip(params, explanation.parameters, strict=True):
            layout, num = param.layout.flat, param.layout.flat.num_shards
            if told.travels not in ("as a subclass", "packed") and not layout.is_even:
                unpadded = layout.numel * param.compute_dtype.itemsize
                pads = nbytes_text((told.gathered_nbytes or 0) - unpadded)
                uneven = f"{layout.num_rows} rows over {num} ranks"
                problem = f"{uneven} are padded by {pads}, which copies the gradient"
                rows = layout.rows_per_shard * num
                remedy = f"make it {rows} rows, or shard another dim by shard_placement_fn"
                yield Advice("uneven rows", (told.name,), problem, remedy)


def _on_narrow_sums(explained: Explained) -> Iterator[Advice]:
    narrow = {
        (explanation.name, short(reduction.dtype), reduction.mesh.num_ranks)
        for group, explanation in explained
        for reduction in reductions_of(group)
        if reduction.dtype.itemsize < torch.float32.itemsize and reduction.mesh.num_ranks > 2
    }
    if narrow:
        names, dtypes, counts = zip(*sorted(narrow), strict=True)
        listed = ", ".join(sorted(set(dtypes)))
        problem = f"{max(counts)} ranks sum gradients in {listed}, and every sum is rounded"
        wide = "MixedPrecisionPolicy(reduce_dtype=torch.float32), for twice the bytes of reductions"
        yield Advice("narrow sums", names, problem, wide)


def _on_unsharded(model: nn.Module, explained: Explained) -> Iterator[Advice]:
    sharded = [param for group, _ in explained for param in group.params]
    ours = {id(form) for p in sharded for form in (p.sharded, getattr(p, "unsharded", None))}
    others = {n: p for n, p in model.named_parameters() if id(p) not in ours}
    for trained in (True, False):
        some = {n: p for n, p in others.items() if p.requires_grad is trained}
        if some:
            nbytes = sum(param.nbytes for param in some.values())
            problem = f"not sharded: {counted(len(some), 'parameter')} of {nbytes_text(nbytes)}"
            remedy = "apply fully_shard to a module around them"
            if trained:
                problem += "; gradients are not averaged across ranks"
                remedy += ", or reduce their gradients yourself"
            yield Advice("unsharded parameters", tuple(some), problem, remedy)
    buffers = dict(model.named_buffers())
    nbytes = sum(buffer.nbytes for buffer in buffers.values())
    shards = sum(explanation.sharded_nbytes for _, explanation in explained)
    if nbytes > max(BUFFERS_NBYTES, BUFFERS_SHARE * shards):
        problem = f"ranks hold {counted(len(buffers), 'buffer')} of {nbytes_text(nbytes)} whole"
        remedy = "compute them when they are needed, share one among modules, or narrow their dtype"
        yield Advice("unsharded buffers", tuple(buffers), problem, remedy)
