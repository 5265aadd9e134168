"""Replicas that an all-reduce hook makes, of which the library knows nothing.

The oracle is the unsharded model of the mean gradients over all ranks, where a rank that does not
use a parameter counts as zeros.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from nets import full
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import fully_shard
from composable_shard.testing import run_ranks

ROWS = 5
"""The first shard holds three of them, the second two."""

Uses = tuple[str, str]
"""How each replica uses the table: not at all, by a factor of zero, or its first or last rows."""


class Lookup(nn.Module):
    """A layer beside parameters that a batch may leave out; one of them has a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.table = nn.Embedding(ROWS, 3)
        self.scale = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        out = self.layer(x)
        if use == "none":
            return out
        rows = torch.tensor([0, 1] if use == "first" else [ROWS - 1, ROWS - 2])
        return out + self.table(rows) * self.scale * (0.0 if use == "zero" else 1.0)


def mean_over(grads: torch.Tensor, mesh: DeviceMesh) -> None:
    """Average over the replicas, as a hook does."""
    dist.all_reduce(grads, group=mesh.get_group("replicate"))
    grads.div_(mesh["replicate"].size())


def train(uses: tuple[Uses, ...]) -> list[list[str]]:
    """Return for each step which parameters differ from the oracle's, in gradient or value."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    oracle = Lookup()
    model = fully_shard(copy.deepcopy(oracle), mesh=mesh["shard"])
    model.set_all_reduce_hook(functools.partial(mean_over, mesh=mesh))
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5) for one in (oracle, model)
    ]
    wrong = []
    for step, of_step in enumerate(uses):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        use = of_step[mesh.get_local_rank("replicate")]
        for one in (oracle, model):
            one(x, use).square().sum().backward()
        for param in oracle.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()
        pairs = list(zip(oracle.named_parameters(), model.parameters(), strict=True))
        wrong.append([name for (name, want), got in pairs if not is_same(got.grad, want.grad)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wrong[-1] += [name for (name, want), got in pairs if not is_same(got, want)]
    return wrong


def is_same(got: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    """Tell whether all ranks have a gradient, and whether it is that."""
    has = torch.tensor(float(got is not None))
    dist.all_reduce(has, dist.ReduceOp.MIN)
    if not has:
        return False
    assert got is not None and want is not None
    return torch.allclose(full(got.detach()), want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "uses",
    [
        (("none", "first"), ("last", "none")),
        (("none", "zero"), ("first", "first")),
        (("none", "none"), ("none", "last")),
    ],
    ids=["rows_of_one_shard", "zeros", "nobody"],
)
def test_shards_and_replicas_of_a_hook_stay_the_same(uses: tuple[Uses, ...]) -> None:
    assert run_ranks(train, 4, uses, timeout=60) == [[[]] * len(uses)] * 4
