"""Where torch's FSDP2 is right, a transformer trains to the same losses with both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional as F

import composable_shard
from composable_shard.testing import run_ranks

VOCABULARY, WIDTH, HEADS, LENGTH = 37, 32, 4, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


Shard = Callable[..., Any]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def losses_of(
    fully_shard: Shard,
    options: dict[str, Any],
    make_optimizer: MakeOptimizer,
    max_norm: float | None = None,
    num_microbatches: int = 1,
) -> list[torch.Tensor]:
    """Train five steps; return the losses, the norms, and the parameters at the end."""
    torch.manual_seed(5)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    noted: list[torch.Tensor] = []
    for _ in range(5):
        for microbatch in range(num_microbatches):
            last = microbatch == num_microbatches - 1
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            noted.append(loss.detach())
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            noted.append(norm.full_tensor())  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    full = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    return [*noted, *(param.detach() for param in full)]


def both(
    policies: tuple[Any, Any], options: dict[str, Any], *args: Any, **kwargs: Any
) -> list[float]:
    """Return the largest relative difference of each number of the two trainings."""
    theirs, ours = (
        losses_of(shard, {"mp_policy": policy, **options}, *args, **kwargs)
        for shard, policy in zip(
            (fsdp.fully_shard, composable_shard.fully_shard), policies, strict=True
        )
    )
    assert not torch.equal(ours[0], ours[5]), "nothing was learnt"
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)]


def policies_of(*args: torch.dtype | None) -> tuple[Any, Any]:
    return fsdp.MixedPrecisionPolicy(*args), composable_shard.MixedPrecisionPolicy(*args)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
}
POLICIES: dict[str, tuple[torch.dtype | None, ...]] = {
    "fp32": (),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp32": (torch.bfloat16, torch.float32),
}


@pytest.mark.brief(2)
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_transformer_trains_as_with_fsdp2(optimizer: str, policy: str) -> None:
    args = (policies_of(*POLICIES[policy]), {}, OPTIMIZERS[optimizer])
    for differences in run_ranks(both, 2, *args, timeout=40):
        assert differences == [0.0] * len(differences)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_transformer_is_clipped_as_with_fsdp2(reshard: bool) -> None:
    args = (policies_of(), {"reshard_after_forward": reshard}, OPTIMIZERS["adamw"])
    for differences in run_ranks(both, 2, *args, max_norm=0.5, timeout=40):
        assert max(differences) <= 1e-6


@pytest.mark.brief(1)
@pytest.mark.parametrize("policy", ["fp32", "bf16, reduced in fp32"])
def test_a_transformer_accumulates_as_with_fsdp2(policy: str) -> None:
    args = (policies_of(*POLICIES[policy]), {}, OPTIMIZERS["adamw"])
    for differences in run_ranks(both, 2, *args, num_microbatches=3, timeout=40):
        assert differences == [0.0] * len(differences)


def test_a_transformer_on_three_ranks_trains_as_with_fsdp2() -> None:
    args = (policies_of(), {}, OPTIMIZERS["sgd"])
    for differences in run_ranks(both, 3, *args, timeout=40):
        assert max(differences) <= 1e-5
