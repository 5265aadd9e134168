"""What about a sharded model costs more than it has to, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composable_shard.core.storage import ShardedParam
from composable_shard.insight.group_steps import GroupStep, ParameterExplanation, short
from composable_shard.insight.report import counted, names_text, nbytes_text

# Which modules of a model are repeated: those that are best sharded one by one --------------------


def repeated_blocks(module: nn.Module) -> set[nn.Module]:
    """Return the outermost modules that stand several times in a list, with parameters.

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
    """Return a policy for ``apply_fully_shard`` that picks them."""
    blocks = repeated_blocks(model) or {model}  # a model without any is one group
    return lambda module: module in blocks


# What to look at in a sharded model ---------------------------------------------------------------

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


def advice_on_groups(model: nn.Module, steps: Sequence[GroupStep]) -> tuple[Advice, ...]:
    """Return what is to say about the groups of a model, the weightiest first."""
    return (
        *_giant_root(steps),
        *_small_groups(steps),
        *_uneven_parameters(steps),
        *_empty_ranks(steps),
        *_narrow_sums(steps),
        *_unsharded_parameters(model, steps),
        *_large_buffers(model, steps),
    )


def _giant_root(steps: Sequence[GroupStep]) -> Iterator[Advice]:
    whole = sum(step.unsharded_nbytes or 0 for step in steps)
    for step in steps:
        nbytes, group = step.unsharded_nbytes or 0, step.group
        if group is not group.tree.root or nbytes <= GIANT_SHARE * whole:
            continue
        blocks = [block for top in group.modules for block in repeated_blocks(top)]
        if not blocks:
            continue
        kind, count = Counter(type(block).__name__ for block in blocks).most_common(1)[0]
        yield Advice(
            "giant root",
            (step.name,),
            f"the root group gathers {nbytes_text(nbytes)} at once, {nbytes / whole:.0%} of the "
            "parameters, and nothing overlaps with that",
            f"apply fully_shard to each {kind} ({count} of them) before the root, or "
            f"apply_fully_shard(model, {kind})",
        )


def _small_groups(steps: Sequence[GroupStep]) -> Iterator[Advice]:
    small = [
        step
        for step in steps
        if step.group is not step.group.tree.root
        and step.params
        and all(told.travels == "packed" for _, told in step.params)
    ]
    if small:
        largest = max(step.unsharded_nbytes or 0 for step in small)
        yield Advice(
            "small group",
            tuple(step.name for step in small),
            f"{counted(len(small), 'group')} of at most {nbytes_text(largest)} each: a gather of "
            "so few bytes is all latency",
            "shard the module around instead, or several in one list: fully_shard([a, b])",
        )


def _padding_nbytes(param: ShardedParam, told: ParameterExplanation) -> int:
    return (told.gathered_nbytes or 0) - param.layout.param.numel * param.compute_dtype.itemsize


def _uneven_parameters(steps: Sequence[GroupStep]) -> Iterator[Advice]:
    for param, told in (pair for step in steps for pair in step.params):
        layout = param.layout.param
        is_even = layout.is_even or layout.num_rows < layout.num_shards
        if told.travels in ("packed", "as a subclass") or is_even:
            continue
        rows = layout.rows_per_shard * layout.num_shards
        yield Advice(
            "uneven rows",
            (told.name,),
            f"{layout.num_rows} rows over {layout.num_shards} ranks are padded by "
            f"{nbytes_text(_padding_nbytes(param, told))}, and the whole gradient is copied to pad "
            "it",
            f"make it {rows} rows, or shard another dim by shard_placement_fn",
        )


def _empty_ranks(steps: Sequence[GroupStep]) -> Iterator[Advice]:
    for step in steps:
        found = [
            (param.layout.param, told.name, _padding_nbytes(param, told))
            for param, told in step.params
            if told.travels != "as a subclass"
            and param.layout.param.num_nonempty < param.layout.param.num_shards
            and param.layout.param.numel
        ]
        if not found:
            continue
        layouts, names, paddings = zip(*found, strict=True)
        fewest = min(layout.num_rows for layout in layouts)
        longer = tuple(
            name
            for layout, name, _ in found
            if max(layout.shape) >= layout.num_shards > layout.num_rows
        )
        remedy = "nothing, if they are small: they share one message"
        if longer:
            remedy = f"shard a longer dim of {names_text(longer)} by shard_placement_fn"
        yield Advice(
            "empty ranks",
            names,
            f"{counted(len(found), 'parameter')} of {step.name} with as few as "
            f"{counted(fewest, 'row')} for {layouts[0].num_shards} ranks: some ranks hold none, "
            f"and gathering pads by {nbytes_text(sum(paddings))}",
            remedy,
        )


def _narrow_sums(steps: Sequence[GroupStep]) -> Iterator[Advice]:
    narrow = {
        (step.name, short(one.dtype), one.mesh.num_ranks)
        for step in steps
        for one in step.reductions
        if one.dtype.itemsize < torch.float32.itemsize and one.mesh.num_ranks > 2
    }
    if narrow:
        names, dtypes, counts = zip(*sorted(narrow), strict=True)
        yield Advice(
            "narrow sums",
            names,
            f"gradients of {max(counts)} ranks are summed in {', '.join(sorted(set(dtypes)))}, "
            "rounded as they go",
            "MixedPrecisionPolicy(reduce_dtype=torch.float32), for twice the bytes of reductions",
        )


def _unsharded_parameters(model: nn.Module, steps: Sequence[GroupStep]) -> Iterator[Advice]:
    params = [param for step in steps for param in step.group.params]
    ours = {id(form) for p in params for form in (p.sharded, getattr(p, "unsharded", None))}
    others = {n: p for n, p in model.named_parameters() if id(p) not in ours}
    for trained in (True, False):
        some = {n: p for n, p in others.items() if p.requires_grad is trained}
        if not some:
            continue
        nbytes = sum(param.numel() * param.itemsize for param in some.values())
        problem = f"{counted(len(some), 'parameter')} of {nbytes_text(nbytes)} not sharded"
        if trained:
            problem += "; gradients are not averaged across ranks"
        yield Advice(
            "unsharded parameters",
            tuple(some),
            problem,
            "apply fully_shard to a module around them"
            + (", or reduce their gradients yourself" if trained else ""),
        )


def _large_buffers(model: nn.Module, steps: Sequence[GroupStep]) -> Iterator[Advice]:
    buffers = dict(model.named_buffers())
    nbytes = sum(buffer.numel() * buffer.itemsize for buffer in buffers.values())
    shards = sum(step.sharded_nbytes for step in steps)
    if nbytes > max(BUFFERS_NBYTES, BUFFERS_SHARE * shards):
        yield Advice(
            "unsharded buffers",
            tuple(buffers),
            f"{counted(len(buffers), 'buffer')} of {nbytes_text(nbytes)} whole on every rank",
            "compute them when they are needed, share one among modules, or narrow their dtype",
        )
