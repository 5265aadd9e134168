"""Generated models: trees of modules, what each parameter is like, who forms a group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from composable_shard.testing import (
    Step,
    Tree,
    TreeLoss,
    TreeSpec,
    assert_trains_like_unsharded,
    shard_tree,
)
from composable_shard.testing.strategies import (
    meshes,
    module_trees,
    reshard_choices,
    training_programs,
    uses,
)

SGD = torch.optim.SGD
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1),
    "sgd_momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
}


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


def shard_and_keep(model: Tree, **options: Any) -> None:
    shard_tree(model, **options).set_reshard_after_backward(False)  # type: ignore[operator]


@dataclass(frozen=True)
class UsedAt:
    """The loss of a tree, and the parameters that it uses for each step and each rank in turn.

    The first that is trained is used besides, so that all ranks go back.
    """

    used: tuple[tuple[tuple[bool, ...], ...], ...]
    skips_unused: bool = False

    def __call__(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        for module in model.modules():
            if isinstance(module, Tree):
                module.skips_unused = self.skips_unused
        of_step = self.used[step % len(self.used)]
        return TreeLoss((of_step[rank % len(of_step)],))(model, step, rank)


@dataclass(frozen=True)
class Case:
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
    options: dict[str, Any] = {"reshard_after_forward": draw(reshard_choices(mesh[-1]))}
    used = draw(uses(draw(st.integers(1 if differs else 0, 3)), spec.num_params))
    if differs:
        options["loss"] = TreeLoss(used)
    elif used:
        options["loss"] = UsedAt(tuple((alike,) for alike in used), draw(st.booleans()))
    options["shard"] = draw(st.sampled_from([shard_tree, shard_and_keep]))
    # All ranks must go back, and as far as each other where they fail.
    program = draw(training_programs(without=["fail_backward"] if differs else []))
    return Case(spec, program, mesh, options)
