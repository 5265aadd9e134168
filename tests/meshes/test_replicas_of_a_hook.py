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
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

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


def with_hook(num_held: int) -> list[list[float] | None]:
    """Return what is left of two parameters, none of whose ranks uses the second."""
    model = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = model

        def forward(self) -> torch.Tensor:
            return 3 * self.params[0].sum()

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    first = fully_shard(First(), mesh=mesh)
    first.set_all_reduce_hook(lambda grads: grads.mul_(2))
    for step in range(num_held + 1):
        first.set_requires_all_reduce(step == num_held)
        first().backward()
    first.reshard()
    grads = [param.grad for param in first.parameters()]
    return [None if grad is None else full(grad).tolist() for grad in grads]


@pytest.mark.parametrize("num_held", [0, 2])
def test_a_hook_gives_zeros_where_no_rank_has_a_gradient(num_held: int) -> None:
    expected = [[6.0 * (num_held + 1)] * 4, [0.0] * 4]
    assert run_ranks(with_hook, 2, num_held, timeout=60) == [expected] * 2


def two(value: torch.Tensor) -> TwoTensor:
    return TwoTensor(value.clone(), value.clone())


class First(torch.autograd.Function):
    """The first inner tensor, whose gradient leaves zeros for the other."""

    @staticmethod
    def forward(ctx: object, value: TwoTensor) -> torch.Tensor:
        return value.a.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> TwoTensor:
        return TwoTensor(grad.clone(), torch.zeros_like(grad))


def of_subclasses() -> list[list[list[float]] | None]:
    """The second replica alone uses the first weight, in the second of two steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Module()
    model.weights = nn.ParameterList([nn.Parameter(two(torch.ones(4, 3))) for _ in range(2)])
    model.bias = nn.Parameter(torch.zeros(4))

    def forward(num: int) -> torch.Tensor:
        total = model.bias.sum()
        for weight in model.weights[:num]:
            total = total + First.apply(weight).sum()
        return total

    model.forward = forward
    fully_shard(model, mesh=mesh["shard"])
    model.set_all_reduce_hook(functools.partial(mean_over, mesh=mesh))
    model(1).backward()
    model.zero_grad()
    model(mesh.get_local_rank("replicate")).backward()
    model.reshard()
    grads = [param.grad for param in model.weights]
    locals_ = [None if grad is None else grad.to_local() for grad in grads]
    return [None if one is None else [one.a.tolist(), one.b.tolist()] for one in locals_]


def with_two_tensor_hooks() -> list[list[list[float]] | None]:
    with two_tensor_hooks():
        return of_subclasses()


def test_a_hook_brings_gradients_of_subclasses_with_zeros_in_an_inner_tensor() -> None:
    """What no rank has seen a gradient of, and so cannot tell what it is made of, gets none."""
    expected = [[[[0.5] * 3] * 2, [[0.0] * 3] * 2], None]
    assert run_ranks(with_two_tensor_hooks, 4, timeout=60) == [expected] * 4
