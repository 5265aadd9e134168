"""Advice on a sharded model: needless costs, and remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap

import torch
from torch import nn

from composable_shard.core.group import ParamGroup
from composable_shard.core.layout import ParamLayout
from composable_shard.insight.group_steps import (
    GroupExplanation,
    ParameterExplanation,
    reductions_of,
    short,
)
from composable_shard.insight.report import counted, names_text, nbytes_text

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


Explained = Sequence[tuple[ParamGroup, GroupExplanation]]
"""The groups of a model, each with its explanation."""


def advice_on(model: nn.Module, explained: Explained) -> Iterator[Advice]:
    """Yield the advice on a model, the most important first."""
    yield from _on_giant_root(explained)
    yield from _on_small_groups(explained)
    yield from _on_uneven_rows(explained)
    yield from _on_empty_ranks(explained)
    yield from _on_narrow_sums(explained)
    yield from _on_unsharded(model, explained)


def _on_giant_root(explained: Explained) -> Iterator[Advice]:
    whole = sum(explanation.gathered_nbytes or 0 for _, explanation in explained)
    for group, explanation in explained:
        nbytes = explanation.gathered_nbytes or 0
        blocks = [block for top in group.modules for block in repeated_blocks(top)]
        if group is group.tree.root and nbytes > GIANT_SHARE * whole and blocks:
            kind, count = Counter(type(block).__name__ for block in blocks).most_common(1)[0]
            problem = (
                f"the root group gathers {nbytes_text(nbytes)} at once, {nbytes / whole:.0%} of "
                "the parameters, and nothing overlaps with that"
            )
            remedy = (
                f"apply fully_shard to each {kind} ({count} of them) before the root, or "
                f"apply_fully_shard(model, {kind})"
            )
            yield Advice("giant root", (explanation.name,), problem, remedy)


def _on_small_groups(explained: Explained) -> Iterator[Advice]:
    small = {
        explanation.name: explanation.gathered_nbytes or 0
        for group, explanation in explained
        if group is not group.tree.root
        and {param.travels for param in explanation.parameters} == {"packed"}
    }
    if small:
        problem = (
            f"{counted(len(small), 'group')} of at most {nbytes_text(max(small.values()))} each: a "
            "gather of so few bytes is all latency"
        )
        remedy = "shard the module around instead, or several in one list: fully_shard([a, b])"
        yield Advice("small group", tuple(small), problem, remedy)


def _padded(
    group: ParamGroup, explanation: GroupExplanation
) -> Iterator[tuple[ParameterExplanation, ParamLayout, int]]:
    """Yield the parameters that some ranks pad, their layouts, and the padding of a gather."""
    params = (param for bucket in group.buckets for param in bucket.params)
    for param, told in zip(params, explanation.parameters, strict=True):
        layout = param.layout.param
        if told.travels != "as a subclass" and not layout.is_even:
            unpadded = layout.numel * param.compute_dtype.itemsize
            yield told, layout, (told.gathered_nbytes or 0) - unpadded


def _on_uneven_rows(explained: Explained) -> Iterator[Advice]:
    for param, layout, padding in chain.from_iterable(starmap(_padded, explained)):
        if param.travels != "packed" and layout.num_rows >= layout.num_shards:
            problem = (
                f"{layout.num_rows} rows over {layout.num_shards} ranks are padded by "
                f"{nbytes_text(padding)}, and the whole gradient is copied to pad it"
            )
            rows = layout.rows_per_shard * layout.num_shards
            remedy = f"make it {rows} rows, or shard another dim by shard_placement_fn"
            yield Advice("uneven rows", (param.name,), problem, remedy)


def _on_empty_ranks(explained: Explained) -> Iterator[Advice]:
    for group, explanation in explained:
        found = [
            (param.name, layout, padding)
            for param, layout, padding in _padded(group, explanation)
            if layout.num_nonempty < layout.num_shards and layout.numel
        ]
        if found:
            names, layouts, paddings = zip(*found, strict=True)
            num_shards, fewest = layouts[0].num_shards, min(layout.num_rows for layout in layouts)
            problem = (
                f"{counted(len(found), 'parameter')} of {explanation.name} with as few as "
                f"{counted(fewest, 'row')} for {num_shards} ranks: some ranks hold none, and "
                f"gathering pads by {nbytes_text(sum(paddings))}"
            )
            longer = [name for name, at, _ in found if max(at.shape) >= num_shards > at.num_rows]
            remedy = "nothing, if they are small: they share one message"
            if longer:
                remedy = f"shard a longer dim of {names_text(longer)} by shard_placement_fn"
            yield Advice("empty ranks", names, problem, remedy)


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
        problem = f"gradients of {max(counts)} ranks are summed in {listed}, rounded as they go"
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
            problem = f"{counted(len(some), 'parameter')} of {nbytes_text(nbytes)} not sharded"
            remedy = "apply fully_shard to a module around them"
            if trained:
                problem += "; gradients are not averaged across ranks"
                remedy += ", or reduce their gradients yourself"
            yield Advice("unsharded parameters", tuple(some), problem, remedy)
    buffers = dict(model.named_buffers())
    nbytes = sum(buffer.nbytes for buffer in buffers.values())
    shards = sum(explanation.sharded_nbytes for _, explanation in explained)
    if nbytes > max(BUFFERS_NBYTES, BUFFERS_SHARE * shards):
        problem = f"{counted(len(buffers), 'buffer')} of {nbytes_text(nbytes)} whole on every rank"
        remedy = "compute them when they are needed, share one among modules, or narrow their dtype"
        yield Advice("unsharded buffers", tuple(buffers), problem, remedy)
