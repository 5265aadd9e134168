"""Small models of every shape of tree, described by values that a test can generate and send."""

from __future__ import annotations

from typing import Any

import torch

from composable_shard.testing.programs import BATCH, WIDTH, Tree, TreeSpec, shard_tree


def build(spec: TreeSpec) -> Tree:
    """Build the model of ``spec`` with the same values on every rank and in every call."""
    torch.manual_seed(1)
    return Tree(spec)


def shard(model: Tree, spec: TreeSpec, **kwargs: Any) -> Tree:
    """Apply ``fully_shard`` to ``model`` from the bottom up, as ``spec`` tells."""
    assert model.spec == spec
    return shard_tree(model, **kwargs)


def group_names(spec: TreeSpec, name: str = "") -> list[str]:
    """Return the names of the modules that ``shard`` makes a group of, the root first."""
    names = [name]
    for index, child in enumerate(spec.children):
        inner = group_names(child, f"{name}.inner.{index}".lstrip("."))
        names += inner if child.grouped else inner[1:]
    return names


def inputs_for(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the batch of one rank: the same in every call, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).to(dtype)
