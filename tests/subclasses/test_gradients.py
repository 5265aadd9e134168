"""Gradients of tensor subclasses: accumulated, missing on a rank, held for replicas."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import average_gradients
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from composable_shard import MixedPrecisionPolicy, fully_shard

FACTORS = {"a": 1.0, "b": -2.0}
"""By what the inner tensors of a weight differ."""

Uses = tuple[bool, bool]
ALL, FIRST, SECOND = (True, True), (True, False), (False, True)


class Sum(nn.Module):
    """Adds up what the used ones of two layers without bias make of the input."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])

    def forward(self, x: torch.Tensor, uses: Uses) -> torch.Tensor:
        used = [weight for weight, is_used in zip(self.weights, uses, strict=True) if is_used]
        return sum((nn.functional.linear(x, weight) for weight in used), torch.zeros(()))


class Pair:
    """A sharded model of TwoTensors, and a plain one for each inner tensor."""

    def __init__(self, replicas: int = 1, **kwargs: Any) -> None:
        torch.manual_seed(0)
        values = [torch.randn(5, 3) for _ in range(2)]
        self.plain = {name: Sum([value * by for value in values]) for name, by in FACTORS.items()}
        self.model: Any = Sum(
            [TwoTensor(*(value * by for by in FACTORS.values())) for value in values]
        )
        extents = (replicas, dist.get_world_size() // replicas)[replicas == 1 :]
        mesh = init_device_mesh(
            "cpu", extents, mesh_dim_names=("replicate", "shard")[-len(extents) :]
        )
        self.shard_rank, self.num_shards = mesh.get_local_rank(mesh.ndim - 1), extents[-1]
        fully_shard(self.model, mesh=mesh, **kwargs)

    def run(self, step: int, uses: Uses = ALL) -> None:
        """Run forward and backward of all; plain gradients are not averaged."""
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 3, generator=generator)
        for one in (self.model, *self.plain.values()) if any(uses) else ():
            one(x, uses).square().sum().backward()

    def assert_mean(self) -> None:
        """Compare each inner tensor of each gradient with the mean over all ranks."""
        self.model.reshard()
        for name, one in self.plain.items():
            for param, own in zip(self.model.weights, one.weights, strict=True):
                mean = nn.Parameter(torch.zeros_like(own))
                mean.grad = torch.zeros_like(own) if own.grad is None else own.grad.clone()
                average_gradients([mean])
                parts = [*mean.grad.chunk(self.num_shards), *[mean.grad[:0]] * self.num_shards]
                assert isinstance(param.grad, DTensor)
                assert param.grad.placements[-1] == Shard(0)
                got = getattr(param.grad.to_local(), name)
                torch.testing.assert_close(got, parts[self.shard_rank], rtol=1e-5, atol=1e-5)

    def zero_grad(self) -> None:
        for one in (self.model, *self.plain.values()):
            one.zero_grad()


def hooks(with_hooks: bool) -> Any:
    return two_tensor_hooks() if with_hooks else contextlib.nullcontext()


both = pytest.mark.parametrize("with_hooks", [True, False])

STEPS = [
    ("no_all_reduce", "sync"),
    ("no_all_reduce", "no_all_reduce", "synchronize"),
    ("no_all_reduce", "no_sync", "sync"),
    ("sync", "no_sync", "no_all_reduce", "synchronize", "sync"),
]
USES = {"all": (ALL,), "other": (FIRST, SECOND), "some": (ALL, FIRST, SECOND)}


@both
@pytest.mark.parametrize("uses", ["some", "other", "all"])
@pytest.mark.parametrize(
    ("steps", "num_ranks", "replicas"),
    [
        *((steps, 4, 2) for steps in STEPS),
        *((("no_sync", "no_sync", "sync"), num_ranks, 1) for num_ranks in (1, 2, 3)),
    ],
)
@on_ranks("num_ranks", timeout=90)
def test_microbatches_add_up_in_every_inner_tensor(
    with_hooks: bool, steps: tuple[str, ...], uses: str, replicas: int
) -> None:
    """Every second rank runs each with the uses of the next one; a missing gradient is zero."""
    chosen = USES[uses]
    with hooks(with_hooks):
        pair = Pair(replicas=replicas)
        for step, how in enumerate(steps):
            if how == "synchronize":
                pair.model.synchronize_gradients()
            else:
                pair.model.set_requires_gradient_sync(how != "no_sync")
                pair.model.set_requires_all_reduce(how != "no_all_reduce")
                pair.run(step, chosen[(step + dist.get_rank() % 2) % len(chosen)])
            if how in ("sync", "synchronize"):
                pair.assert_mean()


@both
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_accumulation_without_sync(with_hooks: bool, reduce_dtype: torch.dtype | None) -> None:
    with hooks(with_hooks):
        pair = Pair(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        with pair.model.no_sync():
            for step in range(2):
                pair.run(step)
        pair.model.reshard()
        for param, plain in zip(pair.model.weights, pair.plain["a"].weights, strict=True):
            grad = param.grad
            if dist.get_world_size() > 1:  # on one rank nothing is left to reduce
                assert grad.placements[0].is_partial()
                assert grad.dtype == (reduce_dtype or torch.float32)
            torch.testing.assert_close(grad.to_local().a.float(), plain.grad, rtol=1e-5, atol=1e-5)
        pair.run(2)
        pair.assert_mean()
        pair.model.zero_grad()
        assert all(param.grad is None for param in pair.model.parameters())
