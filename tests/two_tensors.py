"""``TwoTensor`` with the hooks of the extension tests of PyTorch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from nets import average_gradients
from torch import nn
from torch.testing._internal.common_fsdp import MLP
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import fully_shard

Out = tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None


def pre_all_gather(self: TwoTensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (self.a, self.b), None


def post_all_gather(
    self: TwoTensor,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> Out:
    assert metadata is None, metadata
    a, b = all_gather_outputs
    if out is None:
        calls.append("create")
        return TwoTensor(a, b).to(param_dtype), (a, b)
    assert isinstance(out, TwoTensor), type(out)
    if a.dtype == param_dtype:
        calls.append("alias")
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
        assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
    else:
        calls.append("cast")
        assert out.a.dtype == out.b.dtype == param_dtype, (out.a.dtype, out.b.dtype)
        out.a.copy_(a)
        out.b.copy_(b)
    return None


calls: list[str] = []
"""Which branch of the post hook ran."""


@contextlib.contextmanager
def two_tensor_hooks() -> Iterator[list[str]]:
    """Give ``TwoTensor`` the hooks; yield which branches of the post hook run."""
    calls.clear()
    TwoTensor.fsdp_pre_all_gather = pre_all_gather
    TwoTensor.fsdp_post_all_gather = post_all_gather
    try:
        yield calls
    finally:
        del TwoTensor.fsdp_pre_all_gather
        del TwoTensor.fsdp_post_all_gather


def two_tensor_mlp(alike: bool = True, dim: int = 8) -> nn.Sequential:
    """Make three MLPs whose weights are TwoTensors, of equal inner tensors if ``alike``."""
    model = nn.Sequential(*[MLP(dim, bias=False) for _ in range(3)])
    for mlp in model:
        for linear in (mlp.in_proj, mlp.out_proj):
            weight = linear.weight.detach()
            other = weight.clone() if alike else torch.randn_like(weight) / dim
            linear.weight = nn.Parameter(TwoTensor(weight, other))
    return model


def inner_models(model: nn.Sequential) -> tuple[nn.Sequential, nn.Sequential]:
    """Return two plain models with the first and the second inner tensors of the weights."""
    plain = tuple(nn.Sequential(*[MLP(8, bias=False) for _ in range(3)]) for _ in range(2))
    for name, weight in model.named_parameters():
        for one, inner in zip(plain, (weight.a, weight.b), strict=True):
            one.get_parameter(name).data.copy_(inner)
    return plain


def shard_layers(model: nn.Sequential, **kwargs: object) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def low_precision_step(model: nn.Sequential, inp: torch.Tensor) -> torch.Tensor:
    """Forward and backward of a bf16 copy; the fp32 model gets the averaged gradients."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    loss = low(inp.bfloat16()).sum()
    loss.backward()
    for param, lowered in zip(model.parameters(), low.parameters(), strict=True):
        param.grad = lowered.grad.float()
    average_gradients(model.parameters())
    return loss
