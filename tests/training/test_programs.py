"""Any tree, sharded in any way, follows any training program as the unsharded one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import (
    Step,
    TreeLoss,
    TreeSpec,
    assert_trains_like_unsharded,
)
from composable_shard.testing.strategies import (
    meshes,
    module_trees,
    policies,
    reshard_choices,
    training_programs,
    uses,
)
from training.cases import reproducible


@dataclass(frozen=True)
class Case:
    """The arguments of a call."""

    spec: TreeSpec
    program: list[Step]
    mesh: tuple[int, ...] = (2,)
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        assert_trains_like_unsharded(
            self.spec, self.program, mesh=self.mesh, timeout=30, **self.options
        )


@st.composite
def cases(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32,), differs: bool = False
) -> Case:
    mesh = draw(meshes())
    spec = draw(module_trees(mesh[-1], dtypes, frozen=not differs))
    options = {"reshard_after_forward": draw(reshard_choices(mesh[-1]))}
    if differs:
        num_params = spec().num_params
        options["loss"] = TreeLoss(draw(uses(draw(st.integers(1, 3)), num_params)))
    # All ranks must go back, and as far as each other where they fail.
    program = draw(training_programs(without=["fail_backward"] if differs else []))
    return Case(spec, program, mesh, options)


@reproducible(60)
@given(cases())
def test_any_tree_follows_any_program(case: Case) -> None:
    case.check()


@reproducible(40)
@given(cases(differs=True))
def test_any_tree_of_which_ranks_use_different_parameters_follows_any_program(case: Case) -> None:
    case.check()


@reproducible(20)
@given(cases(dtypes=(torch.float32, torch.bfloat16, torch.float64, torch.int64)))
def test_any_tree_of_mixed_dtypes_follows_any_program(case: Case) -> None:
    case.check()


@reproducible(40)
@given(cases(), policies(any_inputs=True))
def test_any_tree_follows_any_program_under_any_policy(
    case: Case, policy: MixedPrecisionPolicy
) -> None:
    case.options["policy"] = policy
    case.check()
