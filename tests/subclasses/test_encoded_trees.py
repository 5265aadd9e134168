"""Encoding that loses nothing trains any tree, by any program, as the unsharded model."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from training.cases import reproducible

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import TreeLoss, TreeSpec, assert_trains_like_unsharded
from composable_shard.testing.strategies import (
    meshes,
    module_trees,
    policies,
    reshard_choices,
    training_programs,
    uses,
)
from subclasses.lossless import shard_encoded


@st.composite
def cases(draw: st.DrawFn) -> tuple[TreeSpec, list[str], dict[str, Any]]:
    mesh = draw(meshes())
    spec = draw(module_trees(mesh[-1]))
    loss = TreeLoss(draw(uses(draw(st.integers(1, 3)), spec().num_params)))
    program = draw(training_programs(without=["fail_backward"]))
    reshard = draw(reshard_choices(mesh[-1]))
    return spec, program, {"mesh": mesh, "loss": loss, "reshard_after_forward": reshard}


@reproducible(20)
@given(cases(), policies([torch.float64]))
def test_any_tree_with_encoded_gradients_follows_any_program(
    case: tuple[TreeSpec, list[str], dict[str, Any]], policy: MixedPrecisionPolicy
) -> None:
    spec, program, options = case
    assert_trains_like_unsharded(
        spec, program, shard=shard_encoded, policy=policy, timeout=30, **options
    )
