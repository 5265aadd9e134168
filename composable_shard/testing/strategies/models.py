"""Strategies for parameters, modules, and how they are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from composable_shard.policy import MixedPrecisionPolicy
from composable_shard.testing.strategies.shapes import big_shapes, shapes, shard_dims
from composable_shard.testing.trees import ParamSpec, TreeSpec

__all__ = [
    "meshes",
    "module_trees",
    "param_sets",
    "param_specs",
    "policies",
    "reshard_choices",
]

FLOAT32 = (torch.float32,)


@st.composite
def param_specs(
    draw: st.DrawFn,
    num_shards: int,
    dtypes: Sequence[torch.dtype] = FLOAT32,
    frozen: bool = False,
    min_extent: int = 1,
    special: bool = False,
) -> ParamSpec:
    """Parameters with few or many rows, small or big, sharded on any dim.

    Args:
        draw: Given by hypothesis.
        num_shards: Into how many shards they will be cut.
        dtypes: The dtypes they may have; integers are frozen.
        frozen: Whether some are frozen.
        min_extent: Smallest extent of a dim; 0 allows empty parameters.
        special: Whether some are scalars, and some tied to others of their shape and dtype.

    Example:
        >>> from hypothesis import find
        >>> find(param_specs(2, special=True), lambda spec: spec.shape == () and spec.tied).shape
        ()
    """
    dtype = draw(st.sampled_from(dtypes))
    small = shapes(num_shards, min_extent=min_extent)
    big = big_shapes(num_shards, dtype.itemsize)
    some = [small, small, small, big]
    if special:
        # Few shapes, so that there is something to be tied to.
        some += [st.just(()), st.sampled_from([(num_shards + 1,), (2, 3)])]
    shape = draw(st.one_of(some))
    dim = draw(st.one_of(st.just(0), shard_dims(shape))) if shape else 0
    trainable = not frozen or draw(st.sampled_from([True, True, False]))
    tied = special and draw(st.sampled_from([False, False, True]))
    return ParamSpec(shape, dtype, dim, trainable and dtype.is_floating_point, tied)


def param_sets(
    num_shards: int,
    dtypes: Sequence[torch.dtype] = FLOAT32,
    frozen: bool = True,
    max_params: int = 3,
    special: bool = True,
) -> st.SearchStrategy[tuple[ParamSpec, ...]]:
    """The parameters of one module: scalars, few rows or many, on any dim, frozen and tied ones.

    Args:
        num_shards: Into how many shards they will be cut.
        dtypes: The dtypes they may have; integers are frozen.
        frozen: Whether some are frozen.
        max_params: How many there are at most; there may be none.
        special: Whether some are scalars, and some tied to others of their shape and dtype.

    Example:
        >>> from hypothesis import find
        >>> find(param_sets(2), lambda specs: len(specs) == 1 and specs[0].shape == (3, 1))
        (ParamSpec(shape=(3, 1), dtype=torch.float32, dim=0, trainable=True, tied=False),)
    """
    one = param_specs(num_shards, dtypes, frozen, special=special)
    return st.lists(one, max_size=max_params).map(tuple)


def module_trees(
    num_shards: int,
    dtypes: Sequence[torch.dtype] = FLOAT32,
    frozen: bool = True,
    max_depth: int = 2,
    special: bool = True,
) -> st.SearchStrategy[TreeSpec]:
    """Trees of up to seven modules with a parameter or more.

    Nested groups, lists as one group, a root alone, roots and groups without parameters.

    Args:
        num_shards: Into how many shards parameters will be cut.
        dtypes: The dtypes they may have; integers are frozen.
        frozen: Whether some are frozen.
        max_depth: How deep children may be nested.
        special: Whether some are scalars, and some tied to others, also of other groups.

    Example:
        >>> from hypothesis import find
        >>> find(module_trees(2), lambda spec: spec.together).together
        True
    """
    trees = _trees(num_shards, dtypes, frozen, max_depth, special)
    return trees.filter(_has_params)


@st.composite
def _trees(
    draw: st.DrawFn,
    num_shards: int,
    dtypes: Sequence[torch.dtype],
    frozen: bool,
    max_depth: int,
    special: bool,
) -> TreeSpec:
    params = param_sets(num_shards, dtypes, frozen, special=special)
    children: list[TreeSpec] = []
    if max_depth:
        inner = _trees(num_shards, dtypes, frozen, max_depth - 1, special)
        children = draw(st.lists(inner, max_size=2))
    return TreeSpec(
        params=draw(params),
        children=tuple(children),
        grouped=draw(st.sampled_from([True, True, False])),
        together=draw(st.sampled_from([False, False, True])),
    )


def _has_params(spec: TreeSpec) -> bool:
    return bool(spec.params) or any(map(_has_params, spec.children))


def meshes(max_ranks: int = 4, hybrid: bool = True) -> st.SearchStrategy[tuple[int, ...]]:
    """Extents of meshes: ``(shard,)`` or ``(replicate, shard)``; shrinks to two ranks.

    Args:
        max_ranks: Of how many ranks at most.
        hybrid: Whether some have replicas.

    Example:
        >>> from hypothesis import find
        >>> find(meshes(), lambda extents: len(extents) == 2 and min(extents) > 1)
        (2, 2)
    """
    ranks = sorted(range(1, max_ranks + 1), key=lambda n: (n < 2, n))
    found: list[tuple[int, ...]] = [(n,) for n in ranks]
    if hybrid:
        pairs = [(n, k) for n in ranks for k in ranks if n * k <= max_ranks and n > 1]
        found += sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair))
    return st.sampled_from(found)


def policies(
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float64),
    any_inputs: bool = False,
) -> st.SearchStrategy[MixedPrecisionPolicy]:
    """Mixed precision policies; shrinks to the one that casts nothing.

    Args:
        dtypes: What may be chosen besides nothing and float32.
        any_inputs: Whether the modules compute with inputs of any dtype. Then outputs may be cast
            and inputs be left as they are.

    Example:
        >>> from hypothesis import find
        >>> find(policies(), lambda policy: policy.param_dtype is not None).param_dtype
        torch.float32
    """
    dtype = st.sampled_from([None, torch.float32, *dtypes])
    return st.builds(
        MixedPrecisionPolicy,
        dtype,
        dtype,
        dtype if any_inputs else st.none(),
        st.sampled_from([True, True, False]) if any_inputs else st.just(True),
        grad_dtype=st.sampled_from([None, None, *dtypes]),
    )


def reshard_choices(num_shards: int) -> st.SearchStrategy[bool | int | None]:
    """Values of ``reshard_after_forward``: none, yes, no, and each number of fewer ranks.

    Args:
        num_shards: How many shards there are.

    Example:
        >>> from hypothesis import find
        >>> find(reshard_choices(4), lambda choice: isinstance(choice, int) and choice > 1)
        2
    """
    fewer = [k for k in range(2, num_shards) if num_shards % k == 0]
    return st.sampled_from([None, True, False, *fewer])
