"""Plain tensors with the protocol set on the object, as the extension tests of PyTorch do it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, average_gradients
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_fsdp import MLP

from composable_shard import MixedPrecisionPolicy, fully_shard


def pre_all_gather(self: torch.Tensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (self.to(torch.bfloat16),), None


def post_all_gather(
    self: torch.Tensor,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    (tensor,) = all_gather_outputs
    assert metadata is None, metadata
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    if out is not None:
        out.copy_(tensor)
        return None
    return tensor.to(param_dtype), (tensor,)


def biased_mlps() -> nn.Sequential:
    return nn.Sequential(*[MLP(5, bias=True) for _ in range(2)])


def fill(model: nn.Module) -> None:
    """Set every parameter from its full shape, to values that bf16 rounds."""
    for index, param in enumerate(model.parameters()):
        rows = torch.linspace(-1, 1.7 + index, param.numel()).view(param.shape)
        local, start = param, 0
        if isinstance(param, DTensor):
            local = param._local_tensor
            start = dist.get_rank() * -(-param.shape[0] // dist.get_world_size())
        with torch.no_grad():
            local.copy_(rows[start : start + local.shape[0]])


def patch(model: nn.Module, bound: bool) -> int:
    """Set the protocol on the local tensor of every weight; biases stay as they are."""
    weights = [param for name, param in model.named_parameters() if "weight" in name]
    for param in weights:
        local = param._local_tensor
        local.fsdp_pre_all_gather = pre_all_gather
        local.fsdp_post_all_gather = post_all_gather
        if bound:
            local.fsdp_pre_all_gather = pre_all_gather.__get__(local)
            local.fsdp_post_all_gather = post_all_gather.__get__(local)
    return len(weights)


def rounded_step(model: nn.Module, inp: torch.Tensor) -> torch.Tensor:
    """Forward and backward with weights rounded to bf16; the gradients go to ``model``."""
    rounded = copy.deepcopy(model)
    for name, param in rounded.named_parameters():
        if "weight" in name:
            param.data = param.data.bfloat16().float()
    loss = rounded(inp).square().sum()
    loss.backward()
    average_gradients(rounded.parameters())
    for param, low in zip(model.parameters(), rounded.parameters(), strict=True):
        param.grad = low.grad
    return loss


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("bound", [True, False])
@on_ranks("num_ranks", timeout=60)
def test_patched_weights_travel_in_bf16(bound: bool) -> None:
    with torch.device("meta"):
        model = biased_mlps()
    for layer in (*model, model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    reference = biased_mlps()
    fill(model)
    fill(reference)
    assert patch(model, bound) == 4
    inp = torch.randn(2, 5, generator=torch.Generator().manual_seed(43 + dist.get_rank()))
    optimizers = [
        torch.optim.Adam(one.parameters(), lr=1e-2, foreach=True) for one in (model, reference)
    ]
    for _ in range(3):
        loss = model(inp).square().sum()
        loss.backward()
        expected = rounded_step(reference, inp)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


seen: list[tuple[Any, ...]] = []


def pre_with_all(self, m, size, stride, owner, policy, /):
    """Take what a hook may take, under other names than PyTorch's and by position only."""
    return note(self, m, size, stride, owner, policy)


def pre_with_mesh(self, m, /):
    return note(self, m)


def note(self, *given):
    seen.append(given)
    return (self,), None


def pre_bare(self):
    return note(self)


def post_as_it_is(self, outputs, metadata, param_dtype, *, out=None):
    if out is not None:
        return out.copy_(outputs[0]) and None
    return outputs[0].to(param_dtype), outputs


@pytest.mark.parametrize(
    ("hook", "num_given"), [(pre_bare, 0), (pre_with_mesh, 1), (pre_with_all, 5)]
)
@on_ranks(2)
def test_hooks_get_their_arguments_by_position(hook: Callable[..., Any], num_given: int) -> None:
    seen.clear()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Linear(3, 5, bias=False))
    weight = model[0].weight.detach().clone()
    fully_shard(model, mp_policy=policy)
    mesh, local = model[0].weight.device_mesh, model[0].weight._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = hook, post_as_it_is
    x = torch.randn(2, 3)
    assert torch.equal(model(x), x @ weight.T)
    (arguments,) = seen
    expected = (mesh, torch.Size([5, 3]), (3, 1), model[0], policy)
    assert arguments == expected[:num_given]
