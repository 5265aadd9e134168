"""A tensor subclass with gradients that ranks send as int8 blocks, with error feedback.

    python examples/int8_gradients.py
    python examples/train_lm.py --int8-gradients

A reduction sends about a quarter of the bytes of fp32: one byte per element, and one scale per
block. The rounding error of each gradient is added to the next gradient (error feedback), so no
part of a gradient is lost. On every rank, the errors take as much memory as the unsharded gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from composable_shard import fully_shard
from composable_shard.testing import run_ranks

aten = torch.ops.aten
# These operations return an Int8Gradients again; all others return plain tensors.
KEEPS_CLASS = {aten.detach, aten.clone, aten.split, aten.slice, aten.view, aten.as_strided}
KEEPS_CLASS |= {aten.empty_like, aten._to_copy, aten.copy_}
KEEPS_CLASS |= {aten.add_, aten.mul_, aten.sub_, aten.addcdiv_}
BLOCK = 128  # elements that share a scale


class Int8Gradients(torch.Tensor):
    """A weight with a gradient that ranks send as int8."""

    @staticmethod
    def __new__(cls, full: torch.Tensor) -> Int8Gradients:
        return torch.Tensor._make_wrapper_subclass(
            cls, full.shape, full.stride(), dtype=full.dtype, device=full.device
        )

    def __init__(self, full: torch.Tensor) -> None:
        self.full = full
        self.lost: torch.Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["full"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: object) -> Int8Gradients:
        return cls(inner["full"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Gradients({self.full})"

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
        """Send the weight unchanged."""
        return (self.full,), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """Return the gathered weight in the dtype of compute."""
        (full,) = gathered
        if out is None:
            return full.to(dtype), gathered
        return out if full.dtype == dtype else out.copy_(full)

    def fsdp_pre_reduce_scatter(
        self, grad: torch.Tensor, mesh: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Send int8 blocks and their scales; keep the rounding error."""
        exact = grad.float() if self.lost is None else grad + self.lost
        blocks = nn.functional.pad(exact, (0, -exact.shape[1] % block_of(exact)))
        blocks = blocks.unflatten(1, (-1, block_of(exact)))
        scales = blocks.abs().amax(2, keepdim=True) / 127
        rounded = (blocks / scales.clamp_min(1e-30)).round_()
        lost = exact - (rounded * scales).flatten(1)[:, : exact.shape[1]]
        self.lost = lost.nan_to_num_(0, 0, 0)  # otherwise an overflow would spoil all later steps
        return (rounded.to(torch.int8), scales), None

    def fsdp_post_reduce_scatter(self, received: Any, metadata: None, out: torch.Tensor) -> None:
        """Sum the parts of all ranks in fp32, in rank order."""
        out.zero_()
        for blocks, scales in zip(*received, strict=True):
            out += (blocks * scales).flatten()[: len(out)]


torch.serialization.add_safe_globals([Int8Gradients])  # checkpoints load only known classes


def block_of(parts: torch.Tensor) -> int:
    """Return how many elements share a scale."""
    return min(BLOCK, parts.shape[1])


def send_int8_gradients(model: nn.Module) -> None:
    """Replace the parameters of a model, so that ranks send gradients as int8.

    Call it before ``fully_shard``. Tied parameters stay tied. Frozen parameters and scalars are not
    replaced.
    """
    sent: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not param.requires_grad or not param.ndim:
                continue
            if param not in sent:
                sent[param] = nn.Parameter(Int8Gradients(param.detach()))
            setattr(module, name, sent[param])


def train(steps: int, int8: bool) -> list[float]:
    """Learn to reverse vectors, on this rank's batches; return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    if int8:
        send_int8_gradients(model)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
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
    for name, int8 in (("fp32", False), ("int8", True)):
        for rank, losses in enumerate(run_ranks(train, 2, steps=200, int8=int8)):
            last = math.fsum(losses[-20:]) / 20
            print(
                f"{name} gradients, rank {rank}: loss {losses[0]:.3f} at first, {last:.4f} at last"
            )
