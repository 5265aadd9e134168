"""What was weighed for gradients goes with them to other ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard, move, weigh
from train.moved import is_in, on_mesh

WIDTH = 5


class Parts(nn.Module):
    """Two layers, the second of which need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        total = self.first(x).square().sum()
        return total + self.second(x).square().sum() if uses_second else total


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + step + rank, WIDTH, generator=generator, dtype=torch.float64)


class Weighing:
    """A model that moves, and the same in one process."""

    def __init__(self, *meshes: Any) -> None:
        torch.manual_seed(0)
        self.meshes = [on_mesh(*ranks) for ranks in meshes]
        self.whole = Parts().double()
        self.model: Any = copy.deepcopy(self.whole)
        for part in (self.model.first, self.model.second, self.model):
            fully_shard(part, mesh=self.meshes[0])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = self.total = 0

    def move(self, mesh: int) -> None:
        move(self.model, self.optimizer, self.meshes[mesh])

    def clear(self, to_none: bool) -> None:
        for one in (self.model, self.whole):
            one.zero_grad(set_to_none=to_none)
        self.total = 0

    def train(self, mesh: int, uses_second: bool = True) -> None:
        """Run a microbatch on the ranks of a mesh, where the model is; compare with all so far."""
        ranks = self.meshes[mesh].mesh.flatten().tolist()
        for rank in ranks:
            self.whole(tokens(self.step, rank), uses_second).backward()
            self.total += 2 + self.step + rank
        if is_in(self.meshes[mesh]):
            x = tokens(self.step, dist.get_rank())
            loss = self.model(x, uses_second)
            weighed = weigh(self.model, len(x), loss)
            loss.backward()
            assert weighed.total == self.total
            pairs = zip(self.model.named_parameters(), self.whole.parameters(), strict=True)
            for (name, param), plain in pairs:
                got = None if param.grad is None else param.grad.full_tensor()
                expected = None if plain.grad is None else plain.grad / self.total
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=name)
        self.step += 1


MOVES = {
    "fewer": [(0, 1), (0,)],
    "more": [(0,), (0, 1)],
    "and back": [(0, 1), (1,), (0, 1)],
    "hybrid": [(0, 1), ((0,), (1,)), (0, 1)],
}


@pytest.mark.parametrize("route", MOVES)
@on_ranks(2)
def test_gradients_that_were_weighed_go_on(route: str) -> None:
    """A parameter that comes to be used after the move counts what was weighed before, too."""
    meshes = MOVES[route]
    if len(meshes[0]) == 1:
        meshes = [(0, 1), *meshes]
    run = Weighing(*meshes)
    if meshes[0] != MOVES[route][0]:
        run.move(1)
    first = len(meshes) - len(MOVES[route])
    run.train(first, uses_second=False)
    for mesh in range(first + 1, len(meshes)):
        run.move(mesh)
        run.train(mesh, uses_second=mesh > first)
        run.train(mesh)


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("route", ["fewer", "and back"])
@on_ranks(2)
def test_those_that_are_cleared_begin_anew(route: str, to_none: bool, is_before: bool) -> None:
    """Before or after the move."""
    run = Weighing(*MOVES[route])
    run.train(0)
    for mesh in range(1, len(run.meshes)):
        if is_before:
            run.clear(to_none)
        run.move(mesh)
        if not is_before:
            run.clear(to_none)
        run.train(mesh)
        run.train(mesh)
