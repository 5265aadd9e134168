"""Generated models: trees of modules, what each parameter is like, who forms a group."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st

from composable_shard.testing.strategies import module_trees, param_specs
from training.trees import TreeSpec

__all__ = ["num_params", "param_specs", "reproducible", "trainable", "tree_specs"]

FLOAT32 = (torch.float32,)


def reproducible(max_examples: int) -> settings:
    """Run the same examples every time, however slow the machine; a quarter of them in brief.

    ``PARITY_EXAMPLES=10`` in the environment asks for ten times as many, new ones in every run.
    """
    times = int(os.environ.get("PARITY_EXAMPLES", 0))
    if times:
        return settings(max_examples=max_examples * times, deadline=None, database=None)
    if os.environ.get("BRIEF_EXAMPLES"):
        max_examples //= 4
    return settings(max_examples=max_examples, deadline=None, derandomize=True)


def tree_specs(
    num_ranks: int,
    dtypes: Sequence[torch.dtype] = FLOAT32,
    frozen: bool = False,
    max_depth: int = 2,
) -> st.SearchStrategy[TreeSpec]:
    """Trees without scalars and ties, which the oracle here does not know."""
    return module_trees(num_ranks, dtypes, frozen, max_depth, special=False)


def trainable(spec: TreeSpec) -> int:
    """Count the trainable parameters of a tree."""
    own = sum(param.trainable for param in spec.params)
    return own + sum(trainable(child) for child in spec.children)


def num_params(spec: TreeSpec) -> int:
    """Count the parameters of a tree."""
    return len(spec.params) + sum(num_params(child) for child in spec.children)
