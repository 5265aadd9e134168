"""Strategies for shapes, dims, layouts, dtypes and numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import strategies as st

from composable_shard.core.params.layout import PACKED_NBYTES_PER_PEER, ParamLayout

__all__ = [
    "big_shapes",
    "floating_dtypes",
    "num_ranks",
    "param_layouts",
    "shapes",
    "shard_dims",
]

MAX_SMALL_EXTENT = 5


def num_ranks(max_ranks: int = 4) -> st.SearchStrategy[int]:
    """World sizes from 1 to ``max_ranks``; shrinks to 2, the smallest that communicates.

    Example:
        >>> from hypothesis import find
        >>> find(num_ranks(), lambda _: True)
        2
    """
    return st.sampled_from(sorted(range(1, max_ranks + 1), key=lambda n: (n < 2, n)))


def floating_dtypes() -> st.SearchStrategy[torch.dtype]:
    """Dtypes in which parameters are trained.

    Example:
        >>> from hypothesis import find
        >>> find(floating_dtypes(), lambda dtype: dtype.itemsize == 2)
        torch.bfloat16
    """
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def _row_counts(num_shards: int) -> st.SearchStrategy[int]:
    """Rows below, equal to and above the number of shards; none at all; even and not."""
    edges = {1, num_shards - 1, num_shards, num_shards + 1, 2 * num_shards, 3 * num_shards - 1}
    return st.one_of(st.sampled_from(sorted(edges)), st.integers(0, 4 * num_shards + 1))


@st.composite
def shapes(
    draw: st.DrawFn, num_shards: int, max_dims: int = 3, min_extent: int = 1
) -> tuple[int, ...]:
    """Small shapes of which any dim may have fewer, as many or more rows than there are shards.

    Args:
        draw: Given by hypothesis.
        num_shards: Into how many shards one dim will be cut.
        max_dims: Most dims of a shape; there is at least one.
        min_extent: Smallest extent of a dim; 0 allows empty parameters.

    Example:
        >>> from hypothesis import find
        >>> find(shapes(4), lambda shape: 1 < shape[0] < 4)
        (3,)
    """
    dims = draw(st.integers(1, max_dims))
    place = draw(st.integers(0, dims - 1))
    others = st.one_of(st.just(1), st.integers(min_extent, MAX_SMALL_EXTENT))
    rows = _row_counts(num_shards).filter(lambda extent: extent >= min_extent)
    return tuple(draw(rows if dim == place else others) for dim in range(dims))


@st.composite
def big_shapes(draw: st.DrawFn, num_shards: int, itemsize: int = 4) -> tuple[int, ...]:
    """Shapes just too big to share a message with others, with even and uneven rows.

    Args:
        draw: Given by hypothesis.
        num_shards: Into how many shards the rows will be cut.
        itemsize: Bytes of one element.

    Example:
        >>> from hypothesis import find
        >>> find(big_shapes(2), lambda shape: shape[0] % 2)
        (9, 2048)
    """
    trailing = draw(st.sampled_from([(2048,), (2047,), (683, 3)]))
    nbytes = PACKED_NBYTES_PER_PEER * max(1, num_shards - 1)
    least = nbytes // (itemsize * prod(trailing)) + 1
    return (draw(st.integers(least, least + num_shards)), *trailing)


def shard_dims(shape: Sequence[int]) -> st.SearchStrategy[int]:
    """Dims of ``shape`` to shard on, counted from either end; shrinks to 0.

    Example:
        >>> from hypothesis import find
        >>> find(shard_dims((2, 3)), lambda dim: dim < 0)
        -1
    """
    dims = sorted(range(-len(shape), len(shape)), key=lambda dim: (abs(dim), dim < 0))
    return st.sampled_from(dims)


@st.composite
def param_layouts(draw: st.DrawFn, num_shards: int, itemsize: int = 4) -> ParamLayout:
    """How a parameter may be cut: small and big, on any dim, with empty shards, or empty itself.

    Example:
        >>> from hypothesis import find
        >>> layout = find(param_layouts(3), lambda layout: layout.dim == 1 and layout.rows == 4)
        >>> layout.is_even
        False
    """
    small = shapes(num_shards, max_dims=4, min_extent=0)
    shape = draw(st.one_of(small, small, big_shapes(num_shards, itemsize)))
    return ParamLayout(shape, draw(shard_dims(shape)) % len(shape), num_shards)
