"""A Llama-like stack of blocks, about a billion parameters, and the ways to compute with it.

There is neither embedding nor head, and no optimizer: a step is a forward and a backward of blocks,
as in the middle of a larger model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

COMPUTE_DTYPE, REDUCE_DTYPE = torch.bfloat16, torch.float32
ROTARY_BASE = 500_000.0
LABELS = {"ours": "composable_shard", "fsdp2": "torch FSDP2", "plain": "plain module"}


@dataclass(frozen=True)
class Size:
    """How large the stack and one rank's batch are."""

    layers: int = 16
    width: int = 2048
    ffn_width: int = 8192
    head_width: int = 64
    kv_heads: int = 8
    batch: int = 4
    context: int = 2048

    def __post_init__(self) -> None:
        if self.width % (self.head_width * self.kv_heads):
            raise ValueError(
                f"Expected a width divisible by {self.kv_heads} heads of {self.head_width}, "
                f"got {self.width}"
            )


class Block(nn.Module):
    """Causal attention with grouped keys and values, then SwiGLU, each behind its RMSNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        kv_width = size.kv_heads * size.head_width
        self.head_width = size.head_width
        self.attention_norm = nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.ffn_norm = nn.RMSNorm(size.width)
        self.gate = nn.Linear(size.width, size.ffn_width, bias=False)
        self.up = nn.Linear(size.width, size.ffn_width, bias=False)
        self.down = nn.Linear(size.ffn_width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [batch, context, width]
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )  # each [batch, head, context, head_width]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(heads.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, *inputs, use_reentrant=False)
        return output


class Stack(nn.Module):
    """The blocks one after another, a norm, and a number to start backward from."""

    def __init__(self, size: Size, checkpointing: bool) -> None:
        super().__init__()
        blocks: list[nn.Module] = [Block(size) for _ in range(size.layers)]
        if checkpointing:
            blocks = [Checkpointed(block) for block in blocks]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(size.width)
        self.register_buffer("angles", torch.empty(size.context, size.head_width // 2))

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        angles = self.angles[: x.shape[1]]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        output: Tensor = self.norm(x)
        return output.float().square().mean()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass
class Contestant:
    """The stack in one of the ways of computing with it."""

    model: nn.Module
    params: list[nn.Parameter]
    batch: Tensor

    def step(self) -> Tensor:
        """Run forward and backward, and drop the gradients; return the loss."""
        loss: Tensor = self.model(self.batch)
        loss.backward()
        for param in self.params:
            param.grad = None
        self.batch.grad = None
        return loss.detach()


def build_contestant(
    name: str, size: Size, device: torch.device, *, checkpointing: bool
) -> Contestant:
    """Build the named contestant on this rank; with one rank, all have the same weights."""
    with torch.device("meta"):
        model: nn.Module = Stack(size, checkpointing)
    if name == "plain":
        angles = model.angles
        model.to(COMPUTE_DTYPE).register_buffer("angles", angles)  # keeps its precision, as theirs
    else:
        shard_blocks(model, *_library(name), device.type)
    materialize(model, size, device)
    return Contestant(model, list(model.parameters()), make_batch(size, device))


def _library(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if name == "ours":
        from composable_shard import MixedPrecisionPolicy, fully_shard

        return fully_shard, MixedPrecisionPolicy
    from torch.distributed import fsdp

    return fsdp.fully_shard, fsdp.MixedPrecisionPolicy


def shard_blocks(
    model: nn.Module,
    fully_shard: Callable[..., Any],
    policy: Callable[..., Any],
    device_type: str,
) -> None:
    """Shard each block, then the root, by either of the two libraries."""
    kwargs = {
        "mesh": init_device_mesh(device_type, (dist.get_world_size(),)),
        "mp_policy": policy(param_dtype=COMPUTE_DTYPE, reduce_dtype=REDUCE_DTYPE),
    }
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)


@torch.no_grad()
def materialize(model: nn.Module, size: Size, device: torch.device) -> None:
    """Move a model off the meta device and fill the shards of this rank."""
    model.to_empty(device=device)
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        if name.endswith("norm.weight"):
            local.fill_(1)
            continue
        plain_name = name.replace(".block.", ".")
        generator = torch.Generator(device).manual_seed(zlib.crc32(plain_name.encode()))
        values = torch.empty(local.shape, device=device)  # drawn in fp32, whatever the dtype is
        local.copy_(values.normal_(std=0.02, generator=generator))
    positions = torch.arange(size.context, device=device).float()
    half = size.head_width // 2
    steps = torch.arange(half, device=device) / half
    angles: Any = model.angles
    angles.copy_(torch.outer(positions, torch.exp(-math.log(ROTARY_BASE) * steps)))


def make_batch(size: Size, device: torch.device) -> Tensor:
    """Return a batch as an embedding would, which needs a gradient.

    With simulated ranks the gathered weights are garbage and so is all that is computed from them.
    Multiplying garbage takes a GPU less power and so less time than multiplying weights, so the
    plain module gets NaN to compute with as well: all contestants do from the first product on.
    NaN and denormal numbers have no slow path on a GPU, and no kernel here asks for values.
    """
    shape = (size.batch, size.context, size.width)
    if dist.get_world_size() > 1:
        values = torch.full(shape, math.nan, device=device)
    else:
        generator = torch.Generator(device).manual_seed(0)
        values = torch.empty(shape, device=device).normal_(generator=generator)
    return values.to(COMPUTE_DTYPE).requires_grad_()
