"""Small models, sharded in the ways that explain and estimate have to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from two_tensors import two_tensor_mlp

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Layer(nn.Module):
    """One of some alike: two weights, two biases, no copies of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Stack(nn.Module):
    """Layers between two weights that the root holds."""

    def __init__(self, width: int = 256, hidden: int = 384, layers: int = 2) -> None:
        super().__init__()
        self.before = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.after = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def shard(model: Stack, **kwargs: Any) -> Stack:
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def rootless() -> nn.Module:
    """A root without parameters of its own: the last layer opens backward."""
    return shard_children(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))))


def hybrid(num_replicas: int, width: int = 256, **kwargs: Any) -> nn.Module:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return shard(Stack(width), mesh=mesh, **kwargs)


def frozen() -> nn.Module:
    """The first weight and layer are not trained, so backward stops before the first layer."""
    model = Stack()
    model.before.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return shard(model)


def subclasses() -> nn.Module:
    return shard_children(two_tensor_mlp(dim=64))


def shard_children(model: nn.Sequential) -> nn.Module:
    for child in model:
        fully_shard(child)
    return fully_shard(model)


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BF16_SUMS = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)

CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: shard(Stack()),
    "kept": lambda: shard(Stack(), reshard_after_forward=False),
    "freed": lambda: shard(Stack(), reshard_after_forward=True),
    "rootless": rootless,
    "uneven": lambda: shard(Stack(255, 385)),
    "dim1": lambda: shard(
        Stack(), shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None
    ),
    "dim1 uneven": lambda: shard(
        Stack(255, 385), shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None
    ),
    "bf16": lambda: shard(Stack(), mp_policy=BF16),
    "bf16 uneven": lambda: shard(Stack(255, 385), mp_policy=BF16),
    "bf16 sums": lambda: shard(Stack(), mp_policy=BF16_SUMS),
    "offloaded": lambda: shard(Stack(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "frozen": frozen,
}
"""Cases of two ranks."""


def inputs_of(model: nn.Module) -> Tensor:
    """Return a batch in the dtype of compute, so that casting it is not counted."""
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    kinds: list[torch.dtype] = []
    handle = first.register_forward_pre_hook(lambda module, _: kinds.append(module.weight.dtype))
    x = torch.ones(2, first.in_features)
    with torch.no_grad():
        model(x)
    handle.remove()
    return x.to(kinds[0])
