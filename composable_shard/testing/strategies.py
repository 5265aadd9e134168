"""Hypothesis strategies for the inputs of sharding.

For tests of sharded models, of tensor subclasses and of custom collectives. The only part of the
package that needs hypothesis; import it by its full name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import strategies as st

from composable_shard.core.layout import message_cost
from composable_shard.policy import MixedPrecisionPolicy
from composable_shard.testing.programs import STEPS, ParamSpec, Step, TreeSpec

# Strategies for shapes, dims, dtypes and numbers of ranks --------------------------------

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
    """Numbers of rows: 0; below, equal to and above the number of shards; divisible and not."""
    edges = {1, num_shards - 1, num_shards, num_shards + 1, 2 * num_shards, 3 * num_shards - 1}
    return st.one_of(st.sampled_from(sorted(edges)), st.integers(0, 4 * num_shards + 1))


@st.composite
def shapes(
    draw: st.DrawFn, num_shards: int, max_dims: int = 3, min_extent: int = 1
) -> tuple[int, ...]:
    """Small shapes; any dim may have fewer, as many or more rows than there are shards.

    Args:
        draw: Given by hypothesis.
        num_shards: The number of shards of one dim.
        max_dims: The most dims of a shape; there is at least one.
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
        num_shards: The number of shards of the rows.
        itemsize: Bytes of one element.

    Example:
        >>> from hypothesis import find
        >>> find(big_shapes(2), lambda shape: shape[0] % 2)
        (9, 2048)
    """
    trailing = draw(st.sampled_from([(2048,), (2047,), (683, 3)]))
    nbytes = message_cost("gloo", max(2, num_shards))
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


# Strategies for parameters, modules, and how they are sharded -------------------------------------

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
        num_shards: The number of shards of each parameter.
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
        # Few shapes, so that some parameters can be tied.
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
        num_shards: The number of shards of each parameter.
        dtypes: The dtypes they may have; integers are frozen.
        frozen: Whether some are frozen.
        max_params: The most parameters; there may be none.
        special: Whether some are scalars, and some tied to others of their shape and dtype.

    Example:
        >>> from hypothesis import find
        >>> specs = find(param_sets(2), lambda specs: any(not one.trainable for one in specs))
        >>> all(one.dtype == torch.float32 for one in specs)
        True
    """
    specs = param_specs(num_shards, dtypes, frozen, special=special)
    return st.lists(specs, max_size=max_params).map(tuple)


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
        num_shards: The number of shards of each parameter.
        dtypes: The dtypes they may have; integers are frozen.
        frozen: Whether some are frozen.
        max_depth: The deepest nesting of children.
        special: Whether some are scalars, and some tied to others, also of other groups.

    Example:
        >>> from hypothesis import find
        >>> find(module_trees(2), lambda spec: spec.together).together
        True
    """
    params = param_sets(num_shards, dtypes, frozen, special=special)

    def trees(depth: int) -> st.SearchStrategy[TreeSpec]:
        children = st.lists(trees(depth - 1), max_size=2).map(tuple) if depth else st.just(())
        grouped, together = [True, True, False], [False, False, True]
        flags = st.sampled_from(grouped), st.sampled_from(together)
        return st.builds(TreeSpec, params, children, *flags)

    return trees(max_depth).filter(lambda spec: spec.num_params)


def meshes(max_ranks: int = 4, hybrid: bool = True) -> st.SearchStrategy[tuple[int, ...]]:
    """Extents of meshes: ``(shard,)`` or ``(replicate, shard)``; shrinks to two ranks.

    Args:
        max_ranks: The most ranks of a mesh.
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
    """Mixed precision policies; shrinks to the policy that casts nothing.

    Args:
        dtypes: The choices besides nothing and float32.
        any_inputs: Whether the modules take inputs of any dtype. If so, policies may also cast
            outputs, or not cast inputs.

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
    """Values of ``reshard_after_forward``: ``None``, ``True``, ``False``, and numbers of ranks.

    Args:
        num_shards: The number of shards.

    Example:
        >>> from hypothesis import find
        >>> find(reshard_choices(4), lambda choice: isinstance(choice, int) and choice > 1)
        2
    """
    fewer = [k for k in range(2, num_shards) if num_shards % k == 0]
    return st.sampled_from([None, True, False, *fewer])


# Strategies for training loops, and for the parameters that each rank uses ------------------------


def uses(num_ranks: int, num_uses: int) -> st.SearchStrategy[tuple[tuple[bool, ...], ...]]:
    """For each rank, which of ``num_uses`` things (parameters, blocks) it uses.

    Shrinks to everything used by every rank.

    Example:
        >>> from hypothesis import find
        >>> find(uses(2, 2), lambda used: not used[1][0])
        ((True, True), (False, True))
    """
    one_rank = st.tuples(*[st.sampled_from([True, False])] * num_uses)
    return st.tuples(*[one_rank] * num_ranks)


def training_programs(
    max_steps: int = 8, without: Sequence[Step] = ()
) -> st.SearchStrategy[list[Step]]:
    """Programs for ``assert_trains_like_unsharded``; they shrink to the fewest and plainest steps.

    Args:
        max_steps: Length of the longest program.
        without: Steps to leave out.

    Example:
        >>> from hypothesis import find
        >>> find(training_programs(), lambda steps: "checkpoint" in steps and len(steps) > 1)
        ['backward', 'checkpoint']
        >>> find(training_programs(), lambda steps: "accumulate" in steps and "step" in steps)
        ['step', 'accumulate']
    """
    left = [step for step in STEPS if step not in without]
    return st.lists(st.sampled_from(left), min_size=1, max_size=max_steps)
