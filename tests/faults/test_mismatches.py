"""Models that differ between ranks: one error on all ranks at the first forward, and no hang."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.errors import RankMismatchError
from composable_shard.testing import RankError, run_ranks, stop_ranks


def forward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(1, 4, dtype=dtype))


def other_shape() -> None:
    forward(fully_shard(nn.Sequential(nn.Linear(4, 6 + dist.get_rank()))))


def other_dtype() -> None:
    dtype = (torch.float32, torch.float64)[dist.get_rank()]
    forward(fully_shard(nn.Sequential(nn.Linear(4, 6, dtype=dtype))))


def other_policy() -> None:
    policy = MixedPrecisionPolicy(param_dtype=(None, torch.bfloat16)[dist.get_rank()])
    forward(fully_shard(nn.Sequential(nn.Linear(4, 6)), mp_policy=policy))


def other_requires_grad() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 6)))
    model[0].weight.requires_grad_(dist.get_rank() == 1)
    forward(model)


def other_names() -> None:
    forward(fully_shard(nn.Sequential(nn.Linear(4, 6, bias=dist.get_rank() == 0))))


def other_groups() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if dist.get_rank() == 0:
        fully_shard(model[0])
    forward(fully_shard(model))


def other_extension() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 6)))
    if dist.get_rank() == 0:
        local = model[0].weight._local_tensor
        local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
        local.fsdp_post_all_gather = lambda outputs, metadata, dtype, out=None: (
            outputs[0],
            outputs,
        )
    forward(model)


ALIKE = "Expected the same model on all ranks, got on rank 0: {}; on rank 1: {}"
PARAMETER = "parameter '{}' of the root group: shape {}, torch.float32, Shard(0), trainable, on cpu"
WEIGHT = PARAMETER.format("0.weight", [6, 4])
GROUP = "the root group over 2 ranks, param_dtype {}, reduce_dtype None"
TEXTS = [ALIKE]


@pytest.mark.parametrize(
    ("fn", "first", "second"),
    [
        (other_shape, WEIGHT, PARAMETER.format("0.weight", [7, 4])),
        (other_dtype, WEIGHT, WEIGHT.replace("float32", "float64")),
        (other_policy, GROUP.format(None), GROUP.format(torch.bfloat16)),
        (other_requires_grad, WEIGHT.replace("trainable", "frozen"), WEIGHT),
        (other_names, PARAMETER.format("0.bias", [6]), "nothing more"),
        (other_groups, PARAMETER.format("1.weight", [4, 4]), PARAMETER.format("0.weight", [4, 4])),
        (other_extension, f"{WEIGHT}, with its own all-gather", WEIGHT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_differs_between_ranks(
    fn: Callable[[], None], first: str, second: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, timeout=20)
    failure = caught.value.agreed()
    assert failure.exception_type is RankMismatchError
    assert failure.message == ALIKE.format(first, second)


def right() -> list[float]:
    model = fully_shard(nn.Sequential(nn.Linear(4, 1, bias=False)))
    model(torch.ones(1, 4)).sum().backward()
    return model[0].weight.grad.full_tensor().flatten().tolist()


@pytest.mark.parametrize("fn", [other_shape, other_groups])
def test_after_a_mismatch_a_right_model_works(fn: Callable[[], None]) -> None:
    with pytest.raises(RankError):
        run_ranks(fn, 2, timeout=20)
    try:
        assert run_ranks(right, 2, timeout=20) == [[1.0] * 4] * 2
    finally:
        stop_ranks()


def test_one_more_model_on_one_rank_hurts_nobody() -> None:
    try:
        assert run_ranks(right_beside_another, 2, timeout=20) == [[1.0] * 4] * 2
    finally:
        stop_ranks()


def right_beside_another() -> list[float]:
    if dist.get_rank() == 0:
        fully_shard(nn.Linear(4, 4))
    return right()
