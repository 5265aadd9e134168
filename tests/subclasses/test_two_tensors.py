"""Tensor subclasses through the all-gather protocol, as the extension tests of PyTorch do it.

A model of ``TwoTensor`` weights computes what two plain models compute side by side; those are the
oracle, since comparing TwoTensors looks at the first inner tensor only.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from near import Apart
from nets import average_gradients
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import inner_models, shard_layers, two_tensor_hooks, two_tensor_mlp

from composable_shard.testing import run_ranks

NUM_ITERATIONS = 10


def two_tensor_input(dim: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(42 + dist.get_rank() + 1)
    return torch.randn(2, dim, generator=generator)


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)


def assert_two_tensor_parity(
    sharded: nn.Sequential, plain: tuple[nn.Sequential, nn.Sequential]
) -> None:
    """Compare parameters and gradients, inner tensor by inner tensor, with the plain models."""
    for name, param in sharded.named_parameters():
        assert isinstance(param, DTensor) and isinstance(param.to_local(), TwoTensor)
        for inner, one in zip(("a", "b"), plain, strict=True):
            expected = one.get_parameter(name)
            assert_rows(param, inner, expected, name)
            assert (param.grad is None) == (expected.grad is None)
            if param.grad is not None:
                assert_rows(param.grad, inner, expected.grad, f"gradient of {name}")


def assert_rows(sharded: DTensor, inner: str, expected: torch.Tensor, name: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows = list(expected.detach().chunk(num_ranks))
    rows += [expected.detach()[:0]] * (num_ranks - len(rows))
    local = getattr(sharded.to_local().detach(), inner)
    if num_ranks <= 2:
        assert torch.equal(local, rows[rank]), f"{name}.{inner}"
    else:
        torch.testing.assert_close(local, rows[rank], rtol=1e-5, atol=1e-6)


def assert_two_losses(losses: list[torch.Tensor]) -> None:
    two, first, second = losses
    relative = 0 if dist.get_world_size() <= 2 else 1e-5
    for inner, expected in ((two.a, first), (two.b, second)):
        torch.testing.assert_close(inner, expected, rtol=relative, atol=0)


@pytest.mark.brief(3)
@pytest.mark.parametrize(("num_ranks", "dim"), [(3, 1), (2, 8), (1, 8), (3, 8), (3, 5)])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_training_equals_two_plain_models(
    reshard_after_forward: bool, num_ranks: int, dim: int
) -> None:
    """Every second weight has ``dim`` rows, fewer than ranks perhaps."""
    for branches in run_ranks(train_parity, num_ranks, reshard_after_forward, dim, timeout=60):
        # One tensor for each of the six weights; the same storage at every later gather.
        assert branches[:6] == ["create"] * 6
        assert set(branches[6:]) == {"alias"}
        once, again = 6 * NUM_ITERATIONS, 6 * NUM_ITERATIONS
        assert len(branches) == (once + again if reshard_after_forward else once)


def train_parity(reshard_after_forward: bool, dim: int) -> list[str]:
    """Return which branches of the post hook ran."""
    with two_tensor_hooks() as calls:
        model = two_tensor_mlp(alike=False, dim=dim)
        plain = inner_models(model, dim)
        sharded = shard_layers(model, reshard_after_forward=reshard_after_forward)
        optimizers = [adam(one) for one in (sharded, *plain)]
        assert_two_tensor_parity(sharded, plain)
        inp = two_tensor_input(dim)
        for iteration in range(NUM_ITERATIONS):
            losses = [one(inp).sum() for one in (sharded, *plain)]
            for loss in losses:
                loss.backward()
            for one in plain:
                average_gradients(one.parameters())
            assert_two_losses(losses)
            assert_two_tensor_parity(sharded, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=iteration % 2 == 0)
            assert_two_tensor_parity(sharded, plain)
        return list(calls)


@pytest.mark.brief(1)
@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_training_on_ranks_that_send_equals_two_plain_models(num_ranks: int) -> None:
    run_ranks(Apart(train_parity), num_ranks, True, 8, timeout=60)
