"""A model with everything that a checkpoint may hold, and how the tests look at states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import full
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adam, AdamW, Optimizer

from composable_shard import fully_shard

FullyShard = Callable[..., Any]
State = dict[str, Any]

WIDTH = 6

all_ranks = pytest.mark.parametrize("num_ranks", [1, 2, 3])
three_ranks = pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(count, marks=pytest.mark.matrix) for count in (1, 2))]
)
"""Three cut everything unevenly; for tests of what does not depend on how many there are."""


class Inner(nn.Module):
    """A block within a block: five and one rows, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.gate(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = Inner()
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(torch.tanh(x)))  # a bias before the norm matters


class Model(nn.Module):
    """Nested groups, tied weights, a frozen one, buffers, fewer rows than ranks, and extra state.

    In double precision, so that roundings cannot add up to what a mistake would look like.
    ``wide`` is the weight to shard on dim 1: 6 columns, or 7 that no number of ranks divides.
    """

    def __init__(self, columns: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.outer = Outer()
        self.wide = nn.Linear(columns, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, 4, bias=False)
        self.last = nn.Linear(4, WIDTH, bias=False)
        self.last.weight = nn.Parameter(self.tied.weight.detach().T.contiguous())
        self.head = nn.Linear(WIDTH, 4, bias=False)
        self.head.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.columns = columns
        self.epochs = 0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(self.first(x))
        x = x + self.wide(nn.functional.pad(x, (0, self.columns - WIDTH)))
        x = x + self.last(self.tied(x))
        return self.head(x) * self.scale

    def get_extra_state(self) -> int:
        return self.epochs

    def set_extra_state(self, state: int) -> None:
        self.epochs = state


def shard(model: Model, fully_shard: FullyShard = fully_shard, **kwargs: Any) -> Model:
    wide = model.wide.weight

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param is wide else None

    fully_shard(model.outer.inner, **kwargs)
    fully_shard(model.outer, **kwargs)
    return fully_shard(model, shard_placement_fn=place, **kwargs)


def three_models() -> tuple[Model, Model, Model]:
    """Return an unsharded model, ours and that of torch, of the same values."""
    models = []
    for shard_it in (lambda m: m, shard, lambda m: shard(m, torch_fully_shard)):
        torch.manual_seed(0)
        models.append(shard_it(Model()))
    return models[0], models[1], models[2]


def same_on_all_ranks(step: int) -> torch.Tensor:
    """Return a batch that does not depend on the rank, so that world sizes may change."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def is_exact() -> bool:
    """Tell whether the ranks' equal gradients have an exact mean."""
    return dist.get_world_size() <= 2


def train(model: nn.Module, optimizers: Any, start: int, stop: int) -> None:
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    for step in range(start, stop):
        model(same_on_all_ranks(step)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def structure(value: Any) -> Any:
    """Return all of a state but the values: keys in order, types, placements, shapes, dtypes."""
    if isinstance(value, Mapping):
        return type(value), [(key, structure(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [structure(inner) for inner in value]
    if isinstance(value, DTensor):
        local = (value.placements, value.device_mesh, value.to_local().shape)
        return type(value), value.shape, value.stride(), value.dtype, value.requires_grad, local
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.requires_grad
    return value


def assert_equal(got: Any, expected: Any, where: str = "state", exact: bool = True) -> None:
    """Assert that two states hold the same values under the same keys, bit by bit if ``exact``.

    Collective: gathers every DTensor, in the order of the state.
    """
    if isinstance(expected, Mapping):
        assert sorted(map(str, got)) == sorted(map(str, expected)), where
        for key in expected:
            assert_equal(got[key], expected[key], f"{where}.{key}", exact)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for index, one in enumerate(expected):
            assert_equal(got[index], one, f"{where}.{index}", exact)
    elif isinstance(expected, torch.Tensor):
        one, other = full(got).detach(), full(expected).detach()
        assert one.dtype == other.dtype and one.shape == other.shape, where
        if exact:
            assert torch.equal(one, other), f"{where}: {one} and not {other}"
        else:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=where)
    else:
        assert got == expected, f"{where}: {got} and not {expected}"


def plain_model(seed: int = 1, columns: int = 7) -> Model:
    torch.manual_seed(seed)
    return Model(columns)


def sharded_model(seed: int = 0, **kwargs: Any) -> Model:
    return shard(plain_model(seed), **kwargs)


def tensors(state: State) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def evaluate(model: nn.Module, step: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(same_on_all_ranks(step))


def plain_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(inner) for inner in value]
    return full(value).detach().clone() if isinstance(value, torch.Tensor) else value


# Optimizers: one or several, with one group or several, with state or without -------------------


def by_dims(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]


def groups(model: nn.Module) -> list[Optimizer]:
    weights, others = by_dims(model)
    first = {"params": weights, "weight_decay": 0.1, "lr": torch.tensor(0.02)}
    second = {"params": others, "weight_decay": 0.0, "betas": (0.5, 0.6)}
    return [AdamW([first, second], lr=0.01)]


def several(model: nn.Module) -> list[Optimizer]:
    weights, others = by_dims(model)
    trained = [p for p in weights if p.requires_grad]
    return [Adam(trained, lr=0.01, amsgrad=True), SGD(others, lr=0.02, momentum=0.9)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adam": lambda model: [Adam(model.parameters(), lr=0.01, foreach=True)],
    "sgd": lambda model: [SGD(model.parameters(), lr=0.01)],
    "groups": groups,
    "several": several,
}
