"""Generated models: trees of modules, what each parameter is like, who forms a group."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st

from composable_shard.testing.strategies import big_shapes, shapes, shard_dims
from parity.models import ParamSpec, TreeSpec

FLOAT32 = (torch.float32,)


def reproducible(max_examples: int) -> settings:
    """Run the same examples every time, however slow the machine.

    ``PARITY_EXAMPLES=10`` in the environment asks for ten times as many, new ones in every run.
    """
    times = int(os.environ.get("PARITY_EXAMPLES", 0))
    if times:
        return settings(max_examples=max_examples * times, deadline=None, database=None)
    return settings(max_examples=max_examples, deadline=None, derandomize=True)


@st.composite
def param_specs(
    draw: st.DrawFn,
    num_ranks: int,
    dtypes: Sequence[torch.dtype] = FLOAT32,
    frozen: bool = False,
    min_extent: int = 1,
) -> ParamSpec:
    """Parameters with few or many rows, small or big, sharded on any dim."""
    dtype = draw(st.sampled_from(dtypes))
    small = shapes(num_ranks, min_extent=min_extent)
    big = big_shapes(num_ranks, dtype.itemsize)
    shape = draw(st.one_of(small, small, small, big))
    dim = draw(st.one_of(st.just(0), shard_dims(shape)))
    trainable = not frozen or draw(st.sampled_from([True, True, False]))
    return ParamSpec(shape, dtype, dim, trainable and dtype.is_floating_point)


@st.composite
def tree_specs(
    draw: st.DrawFn,
    num_ranks: int,
    dtypes: Sequence[torch.dtype] = FLOAT32,
    frozen: bool = False,
    max_depth: int = 2,
) -> TreeSpec:
    """Trees of up to nine modules: nested groups, lists as one group, root only, empty root."""
    params = st.lists(param_specs(num_ranks, dtypes, frozen), max_size=3)
    children: list[TreeSpec] = []
    if max_depth:
        inner = tree_specs(num_ranks, dtypes, frozen, max_depth - 1)
        children = draw(st.lists(inner, max_size=2))
    return TreeSpec(
        params=tuple(draw(params)),
        children=tuple(children),
        grouped=draw(st.sampled_from([True, True, False])),
        together=draw(st.sampled_from([False, False, True])),
    )


def trainable(spec: TreeSpec) -> int:
    """Count the trainable parameters of a tree."""
    own = sum(param.trainable for param in spec.params)
    return own + sum(trainable(child) for child in spec.children)


def num_params(spec: TreeSpec) -> int:
    """Count the parameters of a tree."""
    return len(spec.params) + sum(num_params(child) for child in spec.children)
