"""What a class caches on its unsharded form is its own; what users set there is on both forms."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from composable_shard import fully_shard, unsharded


class Caching(torch.Tensor):
    """Wraps a tensor, and keeps what it has computed until ``fsdp_post_all_gather`` fills it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: object) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain, named = tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*plain, **named))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None

    @functools.cached_property
    def largest(self) -> float:
        return self.inner.abs().max().item()

    def transposed(self) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = {"transposed": self.inner.T.contiguous()}
        return self.kept["transposed"]

    def fsdp_post_all_gather(
        self, arrived: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return Caching(arrived[0]), arrived
        out.__dict__.pop("kept", None)
        return out.__dict__.pop("largest", None)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Caching) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.transposed() / weight.largest

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.inner / weight.largest, grad.T @ x / weight.largest


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(Caching(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self.weight, "once"):
            del self.weight.once
            self.weight.count = 0
        self.weight.count += 1
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_what_a_class_caches_is_not_copied_back(reshard: bool) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(4, 4) for _ in range(2)]
    model: Any = nn.Sequential(*(Layer(weight.clone()) for weight in plain))
    model[0].weight.once = True
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=reshard)
    model[1].weight.once = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        x = torch.randn(3, 4)
        weights = [weight.clone().requires_grad_() for weight in plain]
        expected = x
        for weight in weights:
            expected = expected @ weight.T / weight.detach().abs().max()
        out = model(x)
        torch.testing.assert_close(out, expected)
        for result in (out, expected):
            result.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain = [weight.detach() - 0.1 * weight.grad for weight in weights]
        if step == 1:  # which makes other unsharded forms, of other values
            model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            plain = [2 * weight for weight in plain]
    with unsharded(model):
        assert model[0].weight.transposed().shape == (4, 4)
    model.reshard()
    for layer in model:
        users = {key: value for key, value in vars(layer.weight).items() if key[0] != "_"}
        assert users == {"count": 3}
