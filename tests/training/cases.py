"""Generated models: trees of modules, what each parameter is like, who forms a group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from composable_shard.testing import Step, TreeLoss, TreeSpec, assert_trains_like_unsharded
from composable_shard.testing.strategies import (
    meshes,
    module_trees,
    reshard_choices,
    training_programs,
    uses,
)


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


@dataclass(frozen=True)
class Case:
    """The arguments of a call."""

    spec: TreeSpec
    program: list[Step]
    mesh: tuple[int, ...] = (2,)
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, **options: Any) -> None:
        options = {"timeout": 30, **self.options, **options}
        assert_trains_like_unsharded(self.spec, self.program, mesh=self.mesh, **options)


@st.composite
def cases(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32,), differs: bool = False
) -> Case:
    mesh = draw(meshes())
    spec = draw(module_trees(mesh[-1], dtypes, frozen=not differs))
    options = {"reshard_after_forward": draw(reshard_choices(mesh[-1]))}
    if differs:
        options["loss"] = TreeLoss(draw(uses(draw(st.integers(1, 3)), spec.num_params)))
    # All ranks must go back, and as far as each other where they fail.
    program = draw(training_programs(without=["fail_backward"] if differs else []))
    return Case(spec, program, mesh, options)
