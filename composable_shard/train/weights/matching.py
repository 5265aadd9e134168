"""Which tensor of a checkpoint goes where in a model, and what does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from composable_shard.errors import ShardError
from composable_shard.train.weights.entries import Entry
from composable_shard.train.weights.files import Stored

Rename = Callable[[str], str | None]

RENAMED = "names after rename"
"""What ranks compare, for messages."""

SHOWN = 20
"""How many names a message lists before it only counts them."""


@dataclass(frozen=True)
class Match:
    """A tensor of the model and those of the checkpoint that have its names, in their order."""

    entry: Entry
    stored: tuple[Stored, ...]


@dataclass(frozen=True)
class Matching:
    """What of a checkpoint goes where.

    Attributes:
        source: The checkpoint, for messages.
        matches: What is found on both sides.
        missing: Names of the model that are not in the checkpoint, also not under a tied name.
        unexpected: Names in the checkpoint, as they stand there, that the model does not have.
    """

    source: str | os.PathLike[str]
    matches: list[Match]
    missing: list[str]
    unexpected: list[str]

    def facts(self) -> list[str]:
        """Describe what must be the same on all ranks."""
        return [f"'{m.entry.names[0]}' of {[one.name for one in m.stored]}" for m in self.matches]

    def check_names(self) -> None:
        """Raise ``ShardError`` if a name is on one side only."""
        if self.missing or self.unexpected:
            sides = {"missing": self.missing, "unexpected": self.unexpected}
            got = "; ".join(f"{side}: {listed(names)}" for side, names in sides.items() if names)
            raise ShardError(
                f"Expected the names of the model in '{self.source}', got {got}; pass rename to "
                "map names, or strict=False to load what there is"
            )

    def check_values(self) -> None:
        """Raise ``ShardError`` if something found on both sides cannot be read into the model."""
        wrong = [text for match in self.matches if (text := _misfit(match))]
        if wrong:
            raise ShardError(
                f"Expected tensors in '{self.source}' that fit the model, got {listed(wrong)}"
            )


def match(
    entries: Sequence[Entry],
    stored: Sequence[Stored],
    rename: Rename | None,
    source: str | os.PathLike[str],
) -> Matching:
    """Find the tensors of a checkpoint in a model.

    Raises:
        ShardError: If two of them would have the same name.
    """
    by_name: dict[str, Stored] = {}
    for one in stored:
        name = one.name if rename is None else rename(one.name)
        if name is None:
            continue
        if name in by_name:
            raise ShardError(
                f"Expected names that rename keeps apart, got '{name}' for both "
                f"'{by_name[name].name}' and '{one.name}' in '{source}'"
            )
        by_name[name] = one
    known = {name for entry in entries for name in entry.names}
    matches = [
        Match(entry, tuple(by_name[name] for name in entry.names if name in by_name))
        for entry in entries
    ]
    return Matching(
        source,
        [match for match in matches if match.stored],
        [match.entry.names[0] for match in matches if not match.stored],
        [one.name for name, one in by_name.items() if name not in known],
    )


def _misfit(match: Match) -> str | None:
    entry, shape = match.entry, tuple(match.entry.tensor.shape)
    name = f"'{entry.names[0]}'"
    for one in match.stored:
        if one.shape != shape and not (shape == () and one.shape == (1,)):
            return f"{name} of shape {list(one.shape)} for {list(shape)}"
        if not torch.can_cast(one.dtype, entry.tensor.dtype):
            return f"{name} of {one.dtype} for {entry.tensor.dtype}"
    if entry.plain is None:
        kind = type(entry.local).__name__
        return f"{name} for a {kind}, which only its own code makes from a plain tensor"
    tensor = entry.tensor
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        return f"{name} for {tensor.placements}, which are no parts of a full tensor"
    return None


def listed(names: Sequence[str]) -> str:
    """Write names one after another, up to some number."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
