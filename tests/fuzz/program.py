"""What a case of the fuzzer does: a model, how it is sharded, and a list of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from .model import Block, Call


@dataclass(frozen=True)
class Op:
    """One step of a program: a method, by its name, of ``ranks.Sharded`` and ``oracle.Oracle``."""

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
        sharding: "", "zero1", "zero2" or "hybrid".
        keep: Whether unsharded parameters are kept after backward.
        offload: Whether shards are on the CPU by policy.
        precision: "" or the ``param_dtype`` of the policy.
        optimizer: "sgd" or "adamw", and "" or "foreach" or "fused" behind a dot.
        live: Whether the parameters are asked of the model at each step, not held from the start.
        start: What happens between sharding and training: "double" (made in float32), "assign",
            "empty" (made on the meta device).
        checks_registered: Whether the sharded parameters have to be registered between steps.
    """

    seed: int
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    own: str = ""
    mesh: tuple[int, ...] = (2,)
    reshard: Any = None
    reshard_root: Any = "same"
    sharding: str = ""
    keep: bool = False
    offload: bool = False
    precision: str = ""
    optimizer: str = "sgd"
    live: bool = False
    start: str = ""
    checks_registered: bool = False

    @property
    def num_ranks(self) -> int:
        total = 1
        for extent in self.mesh:
            total *= extent
        return total

    @property
    def is_deferred(self) -> bool:
        """Whether gradients are reduced before a step of the optimizer, and not by backward."""
        return self.sharding in ("zero1", "hybrid")

    def walk(self) -> Iterator[Block]:
        for block in self.blocks:
            yield from block.walk()


def shown(value: Any, indent: str = "") -> str:
    """Write a case, or a part of one, as an expression that makes it, a block or step a line."""
    if is_dataclass(value):
        pairs = [(one, getattr(value, one.name)) for one in fields(value)]
        said = [f"{one.name}={shown(own, indent)}" for one, own in pairs if own != one.default]
        return f"{type(value).__name__}({', '.join(said)})"
    if isinstance(value, tuple):
        inner = indent + "    "
        return "(" + "".join(f"\n{inner}{shown(one, inner)}," for one in value) + ")"
    return f"frozenset({sorted(value)})" if isinstance(value, frozenset) else repr(value)


@dataclass(frozen=True)
class Find:
    """What went wrong: its kind, by which finds are told apart, and the whole text."""

    kind: str
    text: str = field(compare=False)


KEPT = ("seed", "name", "names")


def shrunk(case: Case, fails: Callable[[Case], bool], max_runs: int) -> Case:
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


def simpler(value: Any) -> Iterator[Any]:
    """Yield values with one part less, or with one part as it is by default, or simpler."""
    if is_dataclass(value):
        for one in fields(value):
            own = getattr(value, one.name)
            if one.name in KEPT or own == one.default:
                continue
            if one.default is not MISSING:
                yield replace(value, **{one.name: one.default})
            for less in simpler(own):
                yield replace(value, **{one.name: less})
    elif isinstance(value, frozenset):
        for one in sorted(value):
            yield value - {one}
    elif isinstance(value, tuple):
        for place in range(len(value)) if len(value) > 1 else ():
            yield value[:place] + value[place + 1 :]
        for place, one in enumerate(value):
            for less in simpler(one):
                yield (*value[:place], less, *value[place + 1 :])
