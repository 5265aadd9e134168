"""Hypothesis strategies for what sharding has to get right.

For tests of sharded models, of tensor subclasses and of custom collectives. The only part of the
package that needs hypothesis; import it by its full name.
"""

from composable_shard.testing.strategies.models import (
    meshes,
    module_trees,
    param_sets,
    param_specs,
    policies,
    reshard_choices,
)
from composable_shard.testing.strategies.programs import (
    AccumulationStep,
    accumulation_programs,
    training_programs,
    uses,
)
from composable_shard.testing.strategies.shapes import (
    big_shapes,
    floating_dtypes,
    num_ranks,
    param_layouts,
    shapes,
    shard_dims,
)

__all__ = [
    "AccumulationStep",
    "accumulation_programs",
    "big_shapes",
    "floating_dtypes",
    "meshes",
    "module_trees",
    "num_ranks",
    "param_layouts",
    "param_sets",
    "param_specs",
    "policies",
    "reshard_choices",
    "shapes",
    "shard_dims",
    "training_programs",
    "uses",
]
