"""A model as users have them: buffers, dropout, tied weights, a loss of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import STEPS, assert_trains_like_unsharded, run_on_ranks
from kit.models import MLP, mlp_loss, shard_blocks

PROGRAM = [*STEPS, *reversed(STEPS), "backward", "step", "evaluate"]


@pytest.mark.brief(2)
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_a_model_with_buffers_dropout_and_ties_follows_all_steps(mesh: tuple[int, ...]) -> None:
    program = [step for step in PROGRAM if step != "accumulate"]
    assert_trains_like_unsharded(MLP, program, mesh=mesh, loss=mlp_loss, shard=shard_blocks)


def test_under_a_policy_that_casts_all() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    program = ["backward", "step", "accumulate", "backward", "step", "evaluate"]
    assert_trains_like_unsharded(MLP, program, loss=mlp_loss, shard=shard_blocks, policy=policy)


def test_one_entry_runs_processes_and_threads() -> None:
    assert run_on_ranks(dist.get_rank, 2) == [0, 1]
    assert run_on_ranks(lambda: dist.get_rank(), 2, backend="threads") == [0, 1]
    with pytest.raises(ValueError) as caught:
        run_on_ranks(dist.get_rank, 2, backend="mpi")  # type: ignore[arg-type]
    assert str(caught.value) == "Expected backend 'gloo' or 'threads', got 'mpi'"


def low() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()


def low_loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 4, generator=generator).bfloat16()).float().square().mean()


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
@pytest.mark.parametrize("sums", [torch.float32, torch.float64], ids=str)
def test_sums_that_are_wider_than_gradients_are_rounded_once(
    mesh: tuple[int, ...], sums: torch.dtype
) -> None:
    """On one rank, too: what is accumulated is not what users get until it is reduced."""
    program = ["accumulate", "accumulate", "backward", "step", "accumulate", "sync", "step"]
    policy = MixedPrecisionPolicy(reduce_dtype=sums)
    assert_trains_like_unsharded(low, program, mesh=mesh, loss=low_loss, policy=policy)
