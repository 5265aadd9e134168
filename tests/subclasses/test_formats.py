"""What extensions may send: several tensors of several dtypes and row counts, with metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import average_gradients
from on_ranks import on_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks

COLUMNS = 4


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to int8 with one scale for all rows; no rows have the scale 1."""
    scale = weight.abs().max() / 127 if weight.numel() else torch.ones(())
    return (weight / scale).round().to(torch.int8), scale


class Int8Weight:
    """The protocol for one weight: int8 rows, a scale per shard, and metadata that is not sent."""

    def __init__(self, scalar_scale: bool) -> None:
        self.scalar_scale = scalar_scale
        self.given: list[object] = []
        self.received: list[object] = []
        self.outs: list[torch.Tensor | None] = []
        self.local: torch.Tensor

    def patch(self, local: torch.Tensor) -> None:
        self.local = local
        local.fsdp_pre_all_gather = self.pre_all_gather
        local.fsdp_post_all_gather = self.post_all_gather

    def pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        rows, scale = int8_rows(self.local)
        self.given.append(object())
        return (rows, scale if self.scalar_scale else scale.view(1, 1)), self.given[-1]

    def post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        rows, scales = outputs
        num_ranks = dist.get_world_size()
        assert rows.dtype == torch.int8 and scales.dtype == torch.float32
        assert scales.shape == ((num_ranks,) if self.scalar_scale else (num_ranks, 1))
        self.received.append(metadata)
        self.outs.append(out)
        chunk = -(-rows.shape[0] // num_ranks)
        weight = rows.to(param_dtype)
        weight *= scales.reshape(-1, 1).repeat_interleave(chunk, 0)[: rows.shape[0]]
        if out is None:
            return weight, (rows, scales)
        out.copy_(weight)
        return None


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """What all ranks together make of a weight: each quantizes its own rows."""
    pairs = [int8_rows(rows) for rows in weight.chunk(dist.get_world_size())]
    return torch.cat([rows.float() * scale for rows, scale in pairs])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("num_rows", "scalar_scale"), [(6, False), (5, True), (1, False)])
@on_ranks("num_ranks", timeout=60)
def test_int8_rows_with_a_scale_for_each_shard(num_rows: int, scalar_scale: bool) -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, num_rows), nn.Tanh())
    weight = model[0].weight.detach().clone().requires_grad_()
    bias = model[0].bias.detach().clone().requires_grad_()
    fully_shard(model)
    extension = Int8Weight(scalar_scale)
    extension.patch(model[0].weight._local_tensor)
    optimizers = [
        torch.optim.SGD(params, lr=0.1) for params in (list(model.parameters()), [weight, bias])
    ]
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        out = model(x)
        out.square().sum().backward()
        used = dequantized(weight.detach()).requires_grad_()
        expected = torch.tanh(nn.functional.linear(x, used, bias))
        expected.square().sum().backward()
        weight.grad = used.grad
        average_gradients([weight, bias])
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
        for param, plain in zip(model.parameters(), (weight, bias), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert extension.received == extension.given and len(extension.given) == 3
    assert extension.outs[0] is None
    unsharded = extension.outs[1]
    assert unsharded is not None and all(out is unsharded for out in extension.outs[1:])


@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (1, 3), (0, 2), (0, 0), (2, 1, 3), (0, 3, 0)])
def test_any_number_of_rows_on_any_rank(counts: tuple[int, ...]) -> None:
    run_ranks(gather_rows, len(counts), counts)


def gather_rows(counts: tuple[int, ...]) -> None:
    """Send, beside the weight, a tensor with as many rows as ``counts`` says for this rank."""
    rank = dist.get_rank()
    model = fully_shard(nn.Sequential(nn.Linear(COLUMNS, 4, bias=False)))
    local, arrived = model[0].weight._local_tensor, []

    def pre_all_gather(mesh: Any) -> Any:
        return (local, torch.arange(counts[rank], dtype=torch.float64) + 10 * rank), None

    def post_all_gather(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        arrived.append(outputs[1].clone())
        return outputs[0], outputs

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather
    model(torch.ones(1, COLUMNS))
    rows = [10.0 * rank + row for rank, count in enumerate(counts) for row in range(count)]
    assert arrived[0].dtype == torch.float64 and arrived[0].tolist() == rows


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare bit by bit on two ranks; on three, sums are taken in another order."""
    if dist.get_world_size() <= 2:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a TwoTensor of two is made of."""
    return [part for one in (tensor.a, tensor.b) for part in (one.a, one.b)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [6, 5, 2])
@on_ranks("num_ranks")
def test_a_subclass_without_hooks_travels_by_its_inner_tensors(
    num_rows: int, param_dtype: torch.dtype | None
) -> None:
    """Take two SGD steps on one TwoTensor of TwoTensors, and on their parts as plain weights."""
    layer = nn.Linear(COLUMNS, num_rows, bias=False)
    a, b, c, d = (torch.randn(num_rows, COLUMNS) for _ in range(4))
    layer.weight = nn.Parameter(TwoTensor(TwoTensor(a, b), TwoTensor(c, d)))
    plain = [nn.Parameter(part.clone()) for part in (a, b, c, d)]
    model = nn.Sequential(layer)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (list(model.parameters()), plain)]
    x = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        out = model(x)
        out.square().sum().backward()
        for param, got in zip(plain, parts_of(out), strict=True):
            low = param.detach().to(param_dtype or param.dtype).requires_grad_()
            expected = nn.functional.linear(x.to(low.dtype), low)
            expected.square().sum().backward()
            param.grad = low.grad.float()
            average_gradients([param])
            assert_near(got, expected)
        for optimizer in optimizers:
            optimizer.step()
        rank, chunk = dist.get_rank(), -(-num_rows // dist.get_world_size())
        for got, param in zip(parts_of(layer.weight.to_local()), plain, strict=True):
            assert_near(got, param[rank * chunk : (rank + 1) * chunk])
        for optimizer in optimizers:
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
