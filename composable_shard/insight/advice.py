"""What about a sharded model costs more than it has to, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import ParamLayout
from composable_shard.insight.group_plan import GroupPlan, ParamPlan
from composable_shard.insight.report import names_text, nbytes_text

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
    blocks = repeated_blocks(model) or {model}  # a model without any is one group
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
        if group is not group.tree.root or nbytes <= GIANT_SHARE * whole:
            continue
        blocks = [block for top in group.modules for block in repeated_blocks(top)]
        if not blocks:
            continue
        kind, count = Counter(type(block).__name__ for block in blocks).most_common(1)[0]
        yield Advice(
            "giant root",
            (plan.name,),
            f"the root group gathers {nbytes_text(nbytes)} at once, {nbytes / whole:.0%} of the "
            "parameters, and nothing overlaps with that",
            f"apply fully_shard to each {kind} ({count} of them) before the root, or "
            f"apply_fully_shard(model, {kind})",
        )


def _small_groups(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    small = [
        plan
        for group, plan in groups
        if group is not group.tree.root
        and plan.params
        and all(param.travels == "packed" for param in plan.params)
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


def _rows(layout: ParamLayout) -> int:
    return layout.shape[layout.dim]


def _padding_nbytes(param: ParamPlan) -> int:
    assert param.layout is not None and param.gathered_nbytes is not None
    return param.gathered_nbytes - param.layout.numel * param.itemsize


def _uneven_parameters(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    for _, plan in groups:
        for param in plan.params:
            layout = param.layout
            if layout is None or param.travels == "packed" or layout.is_even:
                continue
            if _rows(layout) < layout.num_shards:
                continue
            rows = layout.rows_per_shard * layout.num_shards
            yield Advice(
                "uneven rows",
                (param.name,),
                f"{_rows(layout)} rows over {layout.num_shards} ranks are padded by "
                f"{nbytes_text(_padding_nbytes(param))}, and the whole gradient is copied to pad "
                "it",
                f"make it {rows} rows, or shard another dim by shard_placement_fn",
            )


def _empty_ranks(groups: Sequence[tuple[ParamGroup, GroupPlan]]) -> Iterator[Advice]:
    for _, plan in groups:
        found = [
            (param, layout)
            for param in plan.params
            if (layout := param.layout) is not None
            and layout.numel
            and (layout.num_shards - 1) * layout.rows_per_shard >= _rows(layout)
        ]
        if not found:
            continue
        fewest = min(_rows(layout) for _, layout in found)
        nbytes = sum(_padding_nbytes(param) for param, _ in found)
        longer = [
            param.name for param, one in found if max(one.shape) >= one.num_shards > _rows(one)
        ]
        remedy = "nothing, if they are small: they share one message"
        if longer:
            remedy = f"shard a longer dim of {names_text(tuple(longer))} by shard_placement_fn"
        yield Advice(
            "empty ranks",
            tuple(param.name for param, _ in found),
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
    ours |= {id(getattr(p, "unsharded", None)) for group, _ in groups for p in group.params}
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
