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
    policy: Any,
    make_optimizer: MakeOptimizer,
    num_microbatches: int,
) -> list[torch.Tensor]:
    """Train five steps; return the losses, and the parameters at the end."""
    torch.manual_seed(5)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
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
        optimizer.step()
        optimizer.zero_grad()
    full = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    return [*noted, *(param.detach() for param in full)]


def both(dtypes: tuple[torch.dtype | None, ...], *args: Any) -> list[bool]:
    """Tell of each number of the two trainings whether it is the same."""
    theirs, ours = (
        losses_of(package.fully_shard, package.MixedPrecisionPolicy(*dtypes), *args)
        for package in (fsdp, composable_shard)
    )
    assert not torch.equal(ours[0], ours[5]), "nothing was learnt"
    return [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)]


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
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("policy", "num_microbatches"),
    [*((policy, 1) for policy in POLICIES), ("fp32", 3), ("bf16, reduced in fp32", 3)],
)
def test_a_transformer_trains_as_with_fsdp2(
    optimizer: str, policy: str, num_microbatches: int
) -> None:
    args = POLICIES[policy], OPTIMIZERS[optimizer], num_microbatches
    for is_same in run_ranks(both, 2, *args, timeout=40):
        assert all(is_same)
