"""A sharded model against its unsharded oracle on any mesh, whole tensor by whole tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from heard import from_all_ranks
from nets import full
from torch import nn
from torch.distributed.tensor import DTensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def mean_over_ranks(grads: dict[str, torch.Tensor], num_ranks: int) -> dict[str, torch.Tensor]:
    """Sum over all ranks, divide by ``num_ranks``; a rank without a gradient counts as zeros."""
    totals: dict[str, torch.Tensor] = {}
    for said in from_all_ranks(grads):
        for name, grad in said.items():
            totals[name] = totals[name] + grad if name in totals else grad.clone()
    return {name: total / num_ranks for name, total in totals.items()}


class Oracle:
    """The same model on every rank, whole; its gradients are averaged over all ranks by hand.

    ``local`` has been accumulated since the last reduction, ``reduced`` are means, by name.
    """

    def __init__(self, model: nn.Module, num_ranks: int | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.local: dict[str, torch.Tensor] = {}
        self.reduced: dict[str, torch.Tensor] = {}
        self.num_ranks = num_ranks or dist.get_world_size()

    def take(self) -> None:
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                own = self.local.get(name)
                self.local[name] = param.grad if own is None else own + param.grad
                param.grad = None

    def reduce(self) -> None:
        for name, mean in mean_over_ranks(self.local, self.num_ranks).items():
            before = self.reduced.get(name)
            self.reduced[name] = mean if before is None else before + mean
        self.local = {}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for name, param in self.model.named_parameters():
            param.grad = self.reduced.get(name)
        optimizer.step()
        optimizer.zero_grad()
        self.reduced = {}


def gradient_differences(sharded: dict[str, nn.Parameter], oracle: Oracle) -> list[str]:
    found = []
    for name, param in sharded.items():
        wanted = oracle.reduced.get(name)
        if (param.grad is None) != (wanted is None):
            found.append(f"{name}: expected {wanted}, got {param.grad}")
        elif param.grad is not None and wanted is not None:
            assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
            if param.grad.placements != param.placements:
                found.append(f"{name}: {param.grad.placements} instead of {param.placements}")
            found += _difference(f"grad of {name}", full(param.grad), wanted)
    return found


def value_differences(sharded: Iterable[tuple[str, nn.Parameter]], oracle: Oracle) -> list[str]:
    wanted = dict(oracle.model.named_parameters())
    return [
        text
        for name, param in sharded
        for text in _difference(name, full(param.detach()), wanted[name].detach())
    ]


def step_differences(
    model: nn.Module, oracle: Oracle, optimizers: Sequence[torch.optim.Optimizer]
) -> list[str]:
    """Step the model and its oracle; tell how gradients differ before and values after."""
    found = gradient_differences(dict(model.named_parameters()), oracle)
    optimizers[0].step()
    optimizers[0].zero_grad()
    oracle.step(optimizers[1])
    return found + value_differences(model.named_parameters(), oracle)


def _difference(name: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return [f"{name}: {got.dtype} {got.shape} instead of {wanted.dtype} {wanted.shape}"]
    largest = max(1.0, wanted.double().abs().max().item() if wanted.numel() else 0.0)
    if torch.allclose(got, wanted, rtol=0, atol=TOLERANCE[got.dtype] * largest):
        return []
    return [f"{name}: off by {(got.double() - wanted.double()).abs().max():.3g} of {largest:.3g}"]
