"""Models, data and references that the tests on several ranks share."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from composable_shard import fully_shard

WIDTH = 6


class Block(nn.Module):
    """A residual MLP with weights, biases and norms: big and small parameters in one group."""

    def __init__(self, width: int = WIDTH, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or 2 * width + 1
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an input and an output layer, which belong to the root."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH, hidden: int = 0) -> None:
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def shard_net(model: Net, **kwargs: object) -> Net:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def two_nets(num_blocks: int = 2, *, make: type[Net] = Net, **kwargs: object) -> tuple[Net, Net]:
    reference = make(num_blocks)
    return reference, shard_net(copy.deepcopy(reference), **kwargs)


def own_input(step: int = 0, rows: int = 3) -> torch.Tensor:
    """Return a batch that differs between ranks and steps."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(rows, 4, generator=generator)


def average_gradients(params: Iterable[torch.Tensor]) -> None:
    """Replace the gradients of unsharded parameters by their mean over the ranks."""
    grads = [param.grad.detach() for param in params if param.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for grad, mean in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(mean.view(grad.shape))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor; a plain tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def both(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank has of two equal tensors, or both whole where ranks have summands.

    All ranks together compare everything, and nothing is sent.
    """
    kinds = {type(placement) for placement in getattr(actual, "placements", [None])}
    if not kinds <= {Shard, Replicate}:
        return full(actual), expected
    assert isinstance(actual, DTensor)
    assert actual.shape == expected.shape
    mesh, placements = actual.device_mesh, actual.placements
    part = distribute_tensor(expected, mesh, placements, src_data_rank=None)
    return actual.to_local(), part.to_local()


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Assert equality: bit by bit on up to two ranks, else but for the order of a sum."""
    got, expected = both(actual.detach(), expected.detach())
    if dist.get_world_size() <= 2:
        assert torch.equal(got, expected), f"{name}: {(got - expected).abs().max()}"
    else:
        # Gradients are of the order of ten, and what three steps round differently adds up.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6, msg=f"{name}: {{}}".format)


def assert_parity(sharded: nn.Module, reference: nn.Module) -> None:
    """Assert that parameters and gradients equal those of an unsharded model."""
    pairs = zip(sharded.named_parameters(), reference.named_parameters(), strict=True)
    for (name, param), (reference_name, expected) in pairs:
        assert name == reference_name
        assert isinstance(param, DTensor), name
        assert_same(param, expected, name)
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            assert param.grad.placements == param.placements, name
            assert_same(param.grad, expected.grad, f"gradient of {name}")


def train_step(model: nn.Module, step: int, optimizer: torch.optim.Optimizer | None) -> float:
    """Run forward and backward on this rank's batch, and the optimizer if there is one."""
    loss = model(own_input(step)).square().sum()
    loss.backward()
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        average_gradients(model.parameters())
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def assert_trains_alike(sharded: nn.Module, reference: nn.Module, step: int = 0) -> None:
    """Run forward and backward of both, assert that gradients are the same, and clear them."""
    for one in (sharded, reference):
        train_step(one, step, None)
    assert_parity(sharded, reference)
    sharded.zero_grad()
    reference.zero_grad()


class Gated(nn.Module):
    """Uses its scalar and its vector only if ``is_gated``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, is_gated: bool) -> torch.Tensor:
        x = x @ self.weight.T
        return x * self.scale + self.bias if is_gated else x


class Checkpointed(Net):
    """Computes its blocks again in backward."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


class Reentrant(Checkpointed):
    use_reentrant = True
