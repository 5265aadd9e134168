"""What a case of the fuzzer does: a model, how it is sharded, and a list of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from .model import Block, Call


@dataclass(frozen=True)
class Op:
    """One step of a program.

    Args:
        name: What is done; a method of ``ranks.Sharded`` and of ``oracle.Oracle``.
        calls: The forwards of it.
        names: Blocks that it is about.
        how: Which of several ways.
        flag: On or off.
    """

    name: str
    calls: tuple[Call, ...] = ()
    names: tuple[str, ...] = ()
    how: str = ""
    flag: bool = True


@dataclass(frozen=True)
class Case:
    """All that a run depends on.

    Args:
        seed: Where values, batches and names come from.
        blocks: The parts of the model.
        ops: The steps.
        own: Which parameters the root has of its own: "before", "after", "both" or "".
        mesh: Extents: (ranks,) or (replicas, shards).
        reshard: ``reshard_after_forward``.
        reshard_root: The same for the root; "same" for the same.
        keep: Whether unsharded parameters are kept after backward.
        offload: Whether shards are on the CPU by policy.
        precision: "" or the ``param_dtype`` of the policy.
        optimizer: "sgd" or "adamw", and "" or "foreach" or "fused" behind a dot.
        live: Whether the parameters are asked of the model at each step, not held from the start.
        start: What happens between sharding and training: "double" (made in float32), "assign",
            "empty" (made on the meta device).
        checks_registered: Whether the sharded parameters have to be registered between steps.
        checks_growth: Whether the last step that trains is repeated, and tensors are counted.
    """

    seed: int
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    own: str = ""
    mesh: tuple[int, ...] = (2,)
    reshard: Any = None
    reshard_root: Any = "same"
    keep: bool = False
    offload: bool = False
    precision: str = ""
    optimizer: str = "sgd"
    live: bool = False
    start: str = ""
    checks_registered: bool = False
    checks_growth: bool = False

    @property
    def num_ranks(self) -> int:
        total = 1
        for extent in self.mesh:
            total *= extent
        return total

    def walk(self) -> Iterator[Block]:
        for block in self.blocks:
            yield from block.walk()


def shown(case: Case) -> str:
    """Write a case as a few lines, one for each block and step."""
    options = [
        f"{one.name}={getattr(case, one.name)!r}"
        for one in fields(case)
        if one.name not in ("blocks", "ops") and getattr(case, one.name) != one.default
    ]
    lines = ["case " + " ".join(options)]
    for block in case.blocks:
        lines += _block_lines(block, "  ")
    for op in case.ops:
        lines += _op_lines(op)
    return "\n".join(lines)


def _block_lines(block: Block, indent: str) -> list[str]:
    said = _changed(block, {"name", "kind", "children"})
    lines = [f"{indent}{block.name}: {block.kind}{said}"]
    for child in block.children:
        lines += _block_lines(child, indent + "  ")
    return lines


def _op_lines(op: Op) -> list[str]:
    said = _changed(op, {"name", "calls"})
    lines = [f"- {op.name}{said}"]
    for call in op.calls:
        parts = []
        if call.order:
            parts.append("order " + ",".join(call.order))
        if call.skipped:
            parts.append("skipped " + ",".join(sorted(call.skipped)))
        for what in ("off", "unused"):
            for rank, names in enumerate(getattr(call, what)):
                if names:
                    parts.append(f"{what} on rank {rank}: " + ",".join(sorted(names)))
        lines.append("    call " + ("; ".join(parts) or "of all"))
    return lines


def _changed(value: Any, without: set[str]) -> str:
    said = ""
    for one in fields(value):
        own = getattr(value, one.name)
        if one.name not in without and own != one.default:
            said += f" {one.name}={own!r}"
    return said


@dataclass(frozen=True)
class Find:
    """What went wrong: its kind, by which finds are told apart, and the whole text."""

    kind: str
    text: str = field(compare=False)
