"""Makes a failing case smaller, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .model import Block, Call
from .program import Case, Op


def shrunk(case: Case, fails: Callable[[Case], bool], max_runs: int = 300) -> Case:
    """Return a case that still fails and of which nothing more can be left out."""
    runs = 0
    again = True
    while again:
        again = False
        for smaller in simpler(case):
            if runs >= max_runs:
                return case
            runs += 1
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    for place in range(len(case.ops)):
        if len(case.ops) > 1:
            yield replace(case, ops=case.ops[:place] + case.ops[place + 1 :])
    for blocks in _simpler_lists(case.blocks):
        if blocks:
            yield replace(case, blocks=blocks)
    for one in fields(Case):
        if one.name not in ("seed", "blocks", "ops") and getattr(case, one.name) != one.default:
            yield replace(case, **{one.name: one.default})
    if len(case.mesh) == 1 and case.mesh[0] > 2:
        yield replace(case, mesh=(case.mesh[0] - 1,))
    for place, op in enumerate(case.ops):
        for smaller in _simpler_op(op):
            yield replace(case, ops=(*case.ops[:place], smaller, *case.ops[place + 1 :]))


def _simpler_lists(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    for place, block in enumerate(blocks):
        before, after = blocks[:place], blocks[place + 1 :]
        yield before + after
        if block.children:
            yield before + block.children + after
        for smaller in _simpler_block(block):
            yield (*before, smaller, *after)


def _simpler_block(block: Block) -> Iterator[Block]:
    if block.children:
        for children in _simpler_lists(block.children):
            if children:
                yield replace(block, children=children)
        if block.kind != "nest":
            yield replace(block, kind="nest")
    elif block.kind not in ("linear", "scalar"):
        yield replace(block, kind="linear", low=False)
    for one in fields(Block):
        if one.name not in ("name", "kind", "children") and getattr(block, one.name) != one.default:
            yield replace(block, **{one.name: one.default})


def _simpler_op(op: Op) -> Iterator[Op]:
    if len(op.calls) > 1:
        for place in range(len(op.calls)):
            yield replace(op, calls=op.calls[:place] + op.calls[place + 1 :])
    for place, call in enumerate(op.calls):
        for smaller in _simpler_call(call):
            yield replace(op, calls=(*op.calls[:place], smaller, *op.calls[place + 1 :]))
    if len(op.names) > 1:
        for place in range(len(op.names)):
            yield replace(op, names=op.names[:place] + op.names[place + 1 :])
    if op.how and op.name in ("train", "evaluate", "ask_teacher", "save", "restore", "clip"):
        yield replace(op, how="")
    if op.name == "train" and not op.flag:
        yield replace(op, flag=True)


def _simpler_call(call: Call) -> Iterator[Call]:
    if call.order:
        yield replace(call, order=())
    if call.skipped:
        yield replace(call, skipped=frozenset())
    for what in ("off", "unused"):
        sets: tuple[frozenset[str], ...] = getattr(call, what)
        if sets:
            yield replace(call, **{what: ()})
        for rank, names in enumerate(sets):
            if names:
                yield replace(call, **{what: (*sets[:rank], frozenset(), *sets[rank + 1 :])})
            if len(names) > 1:
                for name in sorted(names):
                    less = names - {name}
                    yield replace(call, **{what: (*sets[:rank], less, *sets[rank + 1 :])})
