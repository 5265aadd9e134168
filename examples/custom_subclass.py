"""A tensor subclass that ranks gather as int8 rows: it is checked, then trained on two ranks.

A gather sends about a quarter of the bytes of fp32: one byte per element, and one scale per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from composable_shard import fully_shard
from composable_shard.testing import run_ranks
from composable_shard.testing.extension_kit import check_extension

aten = torch.ops.aten
# These operations return an Int8Rows again; all others return plain tensors.
KEEPS_CLASS = {aten.detach, aten.clone, aten.split, aten.slice, aten.view, aten.as_strided}
KEEPS_CLASS |= {aten.empty_like, aten.zeros_like, aten.new_zeros, aten._to_copy}
KEEPS_CLASS |= {aten.copy_, aten.add_}


class Int8Rows(torch.Tensor):
    """A weight in full precision that is gathered as int8 rows with one scale each."""

    @staticmethod
    def __new__(cls, full: torch.Tensor) -> Int8Rows:
        return torch.Tensor._make_wrapper_subclass(
            cls, full.shape, full.stride(), dtype=full.dtype, device=full.device
        )

    def __init__(self, full: torch.Tensor) -> None:
        self.full = full

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["full"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: object) -> Int8Rows:
        return cls(inner["full"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Rows({self.full})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        plain, named = tree_map_only(cls, lambda weight: weight.full, (args, kwargs))
        out = func(*plain, **named)
        if func.overloadpacket not in KEEPS_CLASS:
            return out
        out = tree_map_only(torch.Tensor, cls, out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        """Send int8 rows and their scales."""
        scales = self.full.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return ((self.full / scales).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """Return rows times scales, as a plain tensor."""
        rows, scales = gathered
        if out is None:
            return (rows * scales).to(dtype), gathered
        return out.copy_(rows * scales)


def train(steps: int) -> list[float]:
    """Learn to reverse vectors, on this rank's batches; return the losses."""
    layers = [nn.Linear(32, 32) for _ in range(2)]
    for layer in layers:
        layer.weight = nn.Parameter(Int8Rows(layer.weight.detach()))
        fully_shard(layer)
    model = fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    # Rounding changes a weight by at most half a step, and a step is 1/127 of its row's maximum.
    print(check_extension(lambda shape: Int8Rows(torch.randn(shape)), tolerance=0.02))
    for rank, found in enumerate(run_ranks(train, 2, steps=100)):
        print(f"rank {rank}: loss {found[0]:.3f} at first, {found[-1]:.3f} at last")
