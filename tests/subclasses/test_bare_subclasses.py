"""Subclasses that know only the ops that torch's own ``fully_shard`` calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from subclasses.wrappers import Wrapper

aten = torch.ops.aten
COLUMNS = 4


class Bare(Wrapper):
    """Is cut by split alone, and loses precision when it is cloned."""

    KNOWN = (aten.detach, aten.split, aten.clone, aten.add_, aten.slice)

    @classmethod
    def compute(cls, func: Any, args: Any, kwargs: Any) -> Any:
        op = func.overloadpacket
        if op not in cls.KNOWN or (op is aten.slice and args[2] != 0):
            raise NotImplementedError(f"{func} of {cls.__name__}")
        if op is aten.clone:
            return args[0].round()
        # As of many classes of torchao, what detach returns wraps the same tensor.
        return args[0] if op is aten.detach else func(*args, **kwargs)

    def fsdp_post_all_gather(
        self, arrived: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return Unsharded(arrived[0].to(dtype)), arrived
        if out.inner.dtype != arrived[0].dtype:
            out.inner.copy_(arrived[0])
        return None


class Unsharded(Bare):
    """What is computed with knows nothing but to be detached."""

    KNOWN = (aten.detach,)


class Product(torch.autograd.Function):
    """A product whose backward reads the inner tensor that its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.inner)
        return x @ weight.inner.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, inner = ctx.saved_tensors
        return grad @ inner, grad.T @ x


class Layer(nn.Module):
    def __init__(self, full: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(Bare(full))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_rows", [8, 5])
@on_ranks("num_ranks")
def test_inner_tensors_that_autograd_saved_and_ops_that_are_not_known(
    num_rows: int, low: bool
) -> None:
    """Compare shards bit by bit, and losses and gradients with those of plain matrices."""
    dtype = torch.bfloat16 if low else torch.float32
    plain = [torch.randn(num_rows, COLUMNS), torch.randn(COLUMNS, num_rows)]
    model = nn.Sequential(*[Layer(full.clone()) for full in plain])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (*model, model):
        fully_shard(layer, reshard_after_forward=True, mp_policy=policy)
    for layer, full in zip(model, plain, strict=True):
        chunks = full.chunk(dist.get_world_size())
        assert torch.equal(layer.weight._local_tensor.inner, chunks[dist.get_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        batch = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(step)).to(dtype)
        weights = [full.to(dtype, copy=True).requires_grad_() for full in plain]
        expected = batch @ weights[0].T @ weights[1].T
        out = model(batch)
        torch.testing.assert_close(out, expected)
        for result in (out, expected):
            result.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain = [full - 0.1 * w.grad.float() for full, w in zip(plain, weights, strict=True)]
