"""The model that all benchmarks train, and the ways to train it that they compare."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

LABELS = {
    "ours": "composable_shard",
    "fsdp2": "torch FSDP2",
    "ddp": "torch DDP",
    "single": "plain module",
}
VOCABULARY = 256
HEAD_WIDTH = 64
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


@dataclass(frozen=True)
class Spec:
    """What is trained and how: the model's size, one rank's batch, dtypes, the optimizer."""

    layers: int = 8
    width: int = 512
    batch: int = 2
    context: int = 128
    dtype_policy: str = "fp32"
    optimizer: str = "adamw"
    sharding: str = "zero3"  # of composable_shard

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype_policy == "bf16" else torch.float32

    def __post_init__(self) -> None:
        if self.width % HEAD_WIDTH:
            raise ValueError(f"Expected a width divisible by {HEAD_WIDTH}, got {self.width}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"Expected one of {list(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.dtype_policy not in ("fp32", "bf16"):
            raise ValueError(f"Expected dtype policy fp32 or bf16, got {self.dtype_policy!r}")


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward net, each with its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, 4 * width)
        self.ffn_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, context, HEAD_WIDTH]
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(heads.transpose(1, 2).flatten(2))
        hidden: Tensor = self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x))))
        return x + hidden


class Gpt(nn.Module):
    """A byte-level GPT."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, spec.width)
        self.position_embedding = nn.Embedding(spec.context, spec.width)
        self.blocks = nn.ModuleList(Block(spec.width) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits  # [batch, context, VOCABULARY]


@dataclass
class Contestant:
    """A model in one of the ways of training, with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    spec: Spec
    autocast: bool

    def step(self, step: int) -> Tensor:
        """Train on the batch of that number and return the loss before the update."""
        loss = self.forward(step)
        loss.backward()
        self.update()
        return loss.detach()

    def forward(self, step: int) -> Tensor:
        tokens, targets = make_batch(self.spec, step)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make_batch(spec: Spec, step: int) -> tuple[Tensor, Tensor]:
    """Bytes to read and bytes to predict, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    shape = (spec.batch, spec.context + 1)
    text = torch.randint(VOCABULARY, shape, generator=generator)
    return text[:, :-1], text[:, 1:]


def build_contestant(name: str, spec: Spec) -> Contestant:
    """Build the named contestant on this rank, with the same weights as all others.

    A dtype may follow the name: ``ours int8`` sends int8.

    The model is made on the meta device, so that none of them ever holds more of it than
    its way of training asks for.

    Raises:
        ImportError: a package of the contestant cannot be imported.
    """
    with torch.device("meta"):
        model: nn.Module = Gpt(spec)
    kind, *wire = name.split()
    model = WRAPPERS[kind](model, spec, *wire)
    optimizer = OPTIMIZERS[spec.optimizer](model.parameters())
    autocast = spec.dtype_policy == "bf16" and name in ("ddp", "single")
    return Contestant(model, optimizer, spec, autocast)


def build_floor(spec: Spec) -> Contestant:
    """Build the plain module, which computes what all contestants compute and nothing more.

    This is the plain module with its parameters in the dtype of compute, so that nothing is
    cast for it. The plain module of `build_contestant` casts its weights at every use under
    the bf16 policy, by autocast, as it would in a user's training.
    """
    with torch.device("meta"):
        model: nn.Module = Gpt(spec)
    model = materialize(model).to(spec.compute_dtype)
    return Contestant(model, OPTIMIZERS[spec.optimizer](model.parameters()), spec, autocast=False)


def wrap_single(model: nn.Module, spec: Spec) -> nn.Module:
    """The plain module. Every rank trains its own, so that the cores are equally busy."""
    return materialize(model)


def wrap_ddp(model: nn.Module, spec: Spec) -> nn.Module:
    return DistributedDataParallel(materialize(model), gradient_as_bucket_view=True)


def wrap_fsdp2(model: nn.Module, spec: Spec) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return shard_blocks(model, spec, fully_shard, MixedPrecisionPolicy)


def wrap_ours(model: nn.Module, spec: Spec, wire: str | None = None) -> nn.Module:
    from composable_shard import BlockFormat, MixedPrecisionPolicy, fully_shard

    shard = partial(fully_shard, sharding=spec.sharding)
    dtype = None if wire is None else getattr(torch, wire)
    is_8_bit = dtype is not None and dtype.itemsize == 1
    reduce_wire = BlockFormat(dtype, stochastic=True) if is_8_bit else dtype
    policy = partial(MixedPrecisionPolicy, gather_wire=dtype, reduce_wire=reduce_wire)
    return shard_blocks(model, spec, shard, policy)


def shard_blocks(
    model: nn.Module, spec: Spec, fully_shard: Callable[..., Any], policy: Callable[..., Any]
) -> nn.Module:
    """Shard each block, then the root, by either of the two libraries."""
    kwargs: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    is_bf16 = spec.dtype_policy == "bf16"
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if is_bf16 else {}
    kwargs["mp_policy"] = policy(**dtypes)
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return materialize(model)


@torch.no_grad()
def materialize(model: nn.Module) -> nn.Module:
    """Move a model off the meta device and fill it from its parameters' names."""
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.empty(param.shape).normal_(std=0.02, generator=generator)
        if name.endswith("norm.weight"):
            full += 1.0
        if isinstance(param, DTensor):
            # No communication: every rank has made the whole parameter and keeps its shard.
            sharded = distribute_tensor(
                full, param.device_mesh, param.placements, src_data_rank=None
            )
            param.to_local().copy_(sharded.to_local())
        else:
            param.copy_(full)
    return model


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "ours": wrap_ours,
    "fsdp2": wrap_fsdp2,
    "ddp": wrap_ddp,
    "single": wrap_single,
}
