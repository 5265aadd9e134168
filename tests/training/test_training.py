"""Training a sharded model gives the losses, gradients and parameters of the unsharded one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard.testing import ParamSpec, Step, TreeSpec
from composable_shard.testing.oracle import MakeOptimizer
from training.cases import OPTIMIZERS, Case

ROWS = ParamSpec((3,)), ParamSpec((1, 5)), ParamSpec((2, 3)), ParamSpec((7, 2))
BIG = ParamSpec((301, 701)), ParamSpec((512, 512)), ParamSpec((5,))
INNER = ParamSpec((3, 5), dim=1), ParamSpec((2, 3, 5), dim=-1), ParamSpec((200, 301, 4), dim=1)
TREE = TreeSpec(ROWS, (TreeSpec(BIG), TreeSpec(INNER)))


class Clipped(torch.optim.SGD):
    """Clips before a step, by torch's function."""

    def __init__(self, params: Iterable[nn.Parameter], max_norm: float) -> None:
        super().__init__(params, lr=0.1)
        self.max_norm = max_norm

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.max_norm)
        return super().step(closure)


STEPPED: dict[str, MakeOptimizer] = {
    **OPTIMIZERS,
    "clipped much": partial(Clipped, max_norm=1e-3),
    "clipped little": partial(Clipped, max_norm=1e3),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", STEPPED)
def test_every_optimizer_steps_and_clips_as_unsharded(optimizer: str, ranks: int) -> None:
    program: list[Step] = ["backward", "step", "zero_grad"] * 4
    Case(TREE, program, (ranks,)).check(optimizer=STEPPED[optimizer])
