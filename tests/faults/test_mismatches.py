"""Models that differ between ranks: one error on all ranks at the first forward, and no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from composable_shard import MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from composable_shard.errors import RankMismatchError
from composable_shard.testing import RankError, run_ranks, stop_ranks


def forward(model: nn.Module) -> None:
    fully_shard(model)(torch.ones(1, 4))


def net(rows: int = 6, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, rows, bias))


def other_shape(rank: int) -> None:
    forward(net(6 + rank))


def other_policy(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=(None, torch.bfloat16)[rank])
    fully_shard(net(), mp_policy=policy)(torch.ones(1, 4))


def other_requires_grad(rank: int) -> None:
    model = fully_shard(net())
    model[0].weight.requires_grad_(rank == 1)
    model(torch.ones(1, 4))


def other_names(rank: int) -> None:
    forward(net(bias=rank == 0))


def other_groups(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank == 0:
        fully_shard(model[0])
    forward(model)


def other_extension(rank: int) -> None:
    model = fully_shard(net())
    if rank == 0:
        local = model[0].weight._local_tensor
        local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
        local.fsdp_post_all_gather = lambda gathered, *_, out=None: (gathered[0], gathered)
    model(torch.ones(1, 4))


Case = Callable[[int], None]


def differs(case: Case) -> None:
    case(dist.get_rank())


ALIKE = "Expected the same model on all ranks, got on rank 0: {}; on rank 1: {}"
PARAMETER = "parameter '{}' of the root group: shape {}, torch.float32, Shard(0), trainable, on cpu"
WEIGHT = PARAMETER.format("0.weight", [6, 4])
GROUP = "the root group over 2 ranks, param_dtype {}, reduce_dtype None"


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (other_shape, WEIGHT, PARAMETER.format("0.weight", [7, 4])),
        (other_policy, GROUP.format(None), GROUP.format(torch.bfloat16)),
        (other_requires_grad, WEIGHT.replace("trainable", "frozen"), WEIGHT),
        (other_names, PARAMETER.format("0.bias", [6]), "nothing more"),
        (other_groups, PARAMETER.format("1.weight", [4, 4]), PARAMETER.format("0.weight", [4, 4])),
        (other_extension, f"{WEIGHT}, with all-gather hooks", WEIGHT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_differs_between_ranks(case: Case, first: str, second: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(differs, 2, case, timeout=20)
    failure = caught.value.agreed()
    assert failure.exception_type is RankMismatchError
    assert failure.message == ALIKE.format(first, second)


def other_shape_on_a_mesh(shapes: list[int], is_own: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = ShardPlacementResult(Shard(0), mesh["shard"])
    options: Any = {"shard_placement_fn": lambda _: own} if is_own else {"mesh": mesh}
    fully_shard(net(shapes[dist.get_rank()]), **options)(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("shapes", "ranks", "is_own"),
    [([6, 6, 6, 7], (2, 3), False), ([6, 6, 7, 7], (0, 2), False), ([6, 6, 6, 7], (2, 3), True)],
)
def test_some_ranks_of_a_mesh_differ(shapes: list[int], ranks: Any, is_own: bool) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(other_shape_on_a_mesh, 4, shapes, is_own, timeout=30)
    said = (f"on rank {r}: {PARAMETER.format('0.weight', [shapes[r], 4])}" for r in ranks)
    assert caught.value.agreed().message == f"{ALIKE.partition('on rank')[0]}{'; '.join(said)}"


def right() -> list[float]:
    model = fully_shard(nn.Sequential(nn.Linear(4, 1, bias=False)))
    model(torch.ones(1, 4)).sum().backward()
    return model[0].weight.grad.full_tensor().flatten().tolist()


def test_after_a_mismatch_a_right_model_works() -> None:
    with pytest.raises(RankError):
        run_ranks(differs, 2, other_groups, timeout=20)
    try:
        assert run_ranks(right, 2, timeout=20) == [[1.0] * 4] * 2
    finally:
        stop_ranks()
