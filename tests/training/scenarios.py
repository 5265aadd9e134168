"""What a test does with a model, done with a sharded one and with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks
from training.compare import Comparison, step_both
from training.oracle import Unsharded
from training.trees import WIDTH, inputs_for

Do = Callable[[Any, torch.Tensor, Callable[[torch.Tensor], None]], Any]
"""``do(model, x, backward)`` runs, calls ``backward(loss)``, and returns what to compare."""


@dataclass(frozen=True)
class Scenario:
    """A model, what to do with it, and how it is sharded.

    Attributes:
        model: Makes the model.
        do: What to do in each step, before the optimizer's.
        groups: Names of the modules to shard, inner ones first; a tuple is one group of several.
        options: Further arguments of ``fully_shard``.
        num_steps: How often.
        optimizes: Whether an optimizer step and ``zero_grad`` end each step.
        exact: Whether two ranks give the bits of the oracle.
    """

    model: Callable[[], nn.Module]
    do: Do
    groups: tuple[str | tuple[str, ...], ...] = ("",)
    options: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 3
    optimizes: bool = True
    exact: bool = True


def follow(scenario: Scenario) -> list[str]:
    """Do the scenario with both models on this rank; return what differs."""
    torch.manual_seed(3)
    model = scenario.model()
    policy = scenario.options.get("mp_policy", MixedPrecisionPolicy())
    oracle = Unsharded(model, policy)
    for name in scenario.groups:
        members = [name] if isinstance(name, str) else list(name)
        modules = [model.get_submodule(member) for member in members]
        fully_shard(modules if len(modules) > 1 else modules[0], **scenario.options)
    assert isinstance(model, FSDPModule)
    comparison = Comparison(model, oracle, scenario.exact and dist.get_world_size() <= 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]

    def oracle_backward(loss: torch.Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)
        oracle.after_backward()

    for step in range(scenario.num_steps):
        x = inputs_for(step, dist.get_rank())
        got = scenario.do(model, x.clone(), torch.Tensor.backward)
        wanted = scenario.do(oracle, x.clone(), oracle_backward)
        _compare(comparison, f"step {step}", got, wanted)
        comparison.grads(f"step {step}")
        if scenario.optimizes:
            step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


def _compare(comparison: Comparison, when: str, got: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        got, wanted = [got], [wanted]
    for place, pair in enumerate(zip(got, wanted, strict=True)):
        comparison.tensor(f"{when}: result {place}", *pair)


def assert_same(scenario: Scenario, ranks: int) -> None:
    differences = run_ranks(follow, ranks, scenario, timeout=20)
    assert differences == [[]] * ranks, differences


# Models -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Stack(nn.Module):
    """Three blocks between a parameter and a head of the root's own."""

    def __init__(self, blocks: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STACK_GROUPS = ("blocks.0", "blocks.1", "blocks.2", "")


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()
