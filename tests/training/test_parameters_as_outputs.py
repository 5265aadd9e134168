"""Modules that give out or keep their own parameters, whose memory comes and goes."""

from __future__ import annotations

import copy

import pytest
import torch
from gathered import note_gathered
from nets import average_gradients, full, own_input
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import fake_ranks, run_ranks


class Prompts(nn.Module):
    """Gives out a parameter, a view of one, and what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.prompt = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x), "first": self.prompt[:2], "scale": self.scale}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = Prompts()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.prompts(x)
        return self.head(found["out"]) + found["first"].sum() * found["scale"], found["scale"]


def differences(has_root: bool) -> list[str]:
    oracle = Model()
    model = copy.deepcopy(oracle)
    fully_shard(model.prompts)
    if has_root:
        fully_shard(model)
    found = []
    for step in range(3):
        for one in (model, oracle):
            out, scale = one(own_input(step))
            (out.square().sum() * scale).backward()
        average_gradients(p for p in oracle.prompts.parameters())
        for (name, param), expected in zip(
            model.prompts.named_parameters(), oracle.prompts.parameters(), strict=True
        ):
            assert param.grad is not None and expected.grad is not None
            if not torch.allclose(full(param.grad), expected.grad, rtol=1e-4):
                found.append(f"{step} {name}")
        with torch.no_grad():
            shown, wanted = (one(own_input(step)) for one in (model, oracle))
        if not all(map(torch.allclose, shown, wanted)):
            found.append(f"{step} without grad")
        for one in (model, oracle):
            one.zero_grad()
    return found


@pytest.mark.parametrize("has_root", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_among_outputs_are_values_and_train(ranks: int, has_root: bool) -> None:
    assert run_ranks(differences, ranks, has_root, timeout=60) == [[]] * ranks


class Keeps(nn.Module):
    """Stores a view of a parameter away, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.layer.weight.t()
        return self.layer(x)


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_of_parameters_leave_no_hooks_behind(ranks: int) -> None:
    with fake_ranks(ranks):
        model = fully_shard(Keeps())
        gathered = note_gathered(model)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
        assert [len(param._backward_hooks or {}) for param in gathered] == [0, 0]
