"""The tensor subclass under test, and a model with one weight of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import FSDPModule, fully_shard
from composable_shard._torch import leaves, local_tensor
from composable_shard.testing.extension_kit.report import Broken

Shape = tuple[int, ...]
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ROWS = 4
"""Rows of a batch on one rank."""

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        make: Makes a tensor of a shape; called after seeding, so that all ranks make the same.
        compute: What a model does with an input and the tensor.
        trains: Whether it can be trained.
        tolerance: How far results may be off, in parts of the largest value.
    """

    make: Callable[[Shape], torch.Tensor]
    compute: Compute
    trains: bool
    tolerance: float

    def tensor(self, shape: Shape, seed: int = 0, device: str = "cpu") -> torch.Tensor:
        """Make the tensor that all ranks make for this seed."""
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return self.make(shape)

    def model(self, shape: Shape, seed: int = 0, device: str = "cpu") -> nn.Sequential:
        """Make a model with one tensor, named ``0.weight``."""
        tensor = self.tensor(shape, seed, device)
        return nn.Sequential(OneWeight(tensor, self.compute, self.trains))

    def sharded(
        self, shape: Shape, seed: int = 0, device: str = "cpu", **settings: object
    ) -> nn.Sequential:
        """Make the model and shard it over all ranks."""
        model = self.model(shape, seed, device)
        for module in (model[0], model):
            fully_shard(module, mesh=whole_mesh(), **settings)  # type: ignore[arg-type]
        assert isinstance(model, FSDPModule)
        return model

    def batch(self, shape: Shape, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
        """Return the batch of all ranks together."""
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(ROWS * dist.get_world_size(), shape[-1], generator=generator)
        return rows.to(dtype if dtype.is_floating_point else torch.float32)

    def expect_alike(
        self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str
    ) -> None:
        """Compare results, inner tensor by inner tensor."""
        for mine, theirs in zip(found, expected, strict=True):
            error = (mine.double() - theirs.double()).abs().max().item()
            largest = theirs.double().abs().max().item()
            if not error <= self.tolerance * largest:
                off = error / largest if largest else math.inf
                raise Broken(
                    f"Expected {what}, got values that are off by {off:.1e} of the "
                    f"largest, where {self.tolerance:g} is allowed"
                )


class OneWeight(nn.Module):
    """Computes with one weight."""

    def __init__(self, weight: torch.Tensor, compute: Compute, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trains)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do what the author of the tensor says."""
        return self.compute(x, self.weight)


def whole_mesh() -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard_of(model: nn.Sequential) -> torch.Tensor:
    """Return what this rank holds of the weight."""
    return local_tensor(model.get_parameter("0.weight"))


def mine(output: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's rows of what the whole batch gave."""
    return [leaf[dist.get_rank() * ROWS :][:ROWS] for leaf in plain(output)]


def plain(output: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that an output is made of."""
    return leaves(output.detach())
