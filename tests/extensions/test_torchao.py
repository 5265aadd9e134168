"""The tensor subclasses of torchao train sharded as they train unsharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import run_ranks

pytest.importorskip("torchao", reason="torchao is not installed; it comes with the extra 'test'")

from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

from extensions.torchao_layers import agree_on_scales, model_of

STEPS = 4
BATCH = 8
LR = 1.0  # frozen weights would change the last losses by more than a tenth


def batch_of(rank: int, step: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(BATCH, columns, generator=generator)


def losses_unsharded(model: nn.Module, dtype: torch.dtype, columns: int) -> list[list[float]]:
    """Train on the batches of all ranks, one after the other; return the losses of each step.

    What quantizes activations or gradients does it by the batch, so that of each rank is one here.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    found = []
    for step in range(STEPS):
        losses = []
        for rank in range(dist.get_world_size()):
            computing = model if dtype == torch.float32 else low_copy(model, dtype)
            loss = computing(batch_of(rank, step, columns).to(dtype)).square().mean()
            (loss / dist.get_world_size()).backward()
            losses.append(loss.item())
            if computing is not model:
                take_gradients(model, computing)
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses)
    return found


def low_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    low = copy.deepcopy(model).to(dtype)
    low.zero_grad()  # copies of subclasses have gradients
    return low


def take_gradients(model: nn.Module, computing: nn.Module) -> None:
    for param, low in zip(model.parameters(), computing.parameters(), strict=True):
        if low.grad is not None:
            grad = low.grad.float()
            param.grad = grad if param.grad is None else param.grad + grad


def losses_sharded(
    kind: str, model: nn.Sequential, dtype: torch.dtype, columns: int, reshards: bool
) -> list[list[float]]:
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
    for module in (model[0], model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=reshards)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    found = []
    for step in range(STEPS):
        agree_on_scales(model)
        if kind == "float8 ahead":
            precompute_float8_dynamic_scale_for_fsdp(model)
        loss = model(batch_of(dist.get_rank(), step, columns)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        found.append(losses)
    return found


def compare_losses(kind: str, rows: int, columns: int, low: bool, reshards: bool) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    expected = losses_unsharded(model_of(kind, rows, columns), dtype, columns)
    found = losses_sharded(kind, model_of(kind, rows, columns), dtype, columns, reshards)
    # Unsharded, bf16 weights are rounded to float8; sharded, fp32 ones are.
    of_low = 0.05 if kind.startswith("float8") else 0.02
    tolerance = of_low if low else 1e-5
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)


@pytest.mark.parametrize("reshards", [True, False], ids=["reshards", "keeps"])
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("rows", [12, 7])
@pytest.mark.parametrize("kind", ["int8", "int8 mixed", "bitnet", "float8", "float8 ahead", "moe"])
def test_losses_are_those_of_an_unsharded_run(
    kind: str, rows: int, num_ranks: int, low: bool, reshards: bool
) -> None:
    run_ranks(compare_losses, num_ranks, kind, rows, 16, low, reshards)


@pytest.mark.parametrize("reshards", [True, False], ids=["reshards", "keeps"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_frozen_nf4_weight_under_trained_layers(num_ranks: int, reshards: bool) -> None:
    """NF4 is cut in blocks alone, so into even shards alone, and gathered in its own dtype."""
    run_ranks(compare_losses, num_ranks, "nf4", 64, 64, False, reshards)
