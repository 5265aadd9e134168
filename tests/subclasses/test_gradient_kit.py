"""The kit passes hooks for gradients that are right, and says of planted faults what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable_shard.testing.extension_kit import check_extension
from int8_gradients import Int8Gradients

PRE, POST = "fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter"
CHECKS = ["gradient sent", "gradient summed", "no gradient"]
SKIP = ["training", "fewer ranks", "offload", "mixed precision", "meta device"]
SKIP += ["sharded state dict", "full state dict", "deepcopy"]
right_pre = Int8Gradients.fsdp_pre_reduce_scatter
right_post = Int8Gradients.fsdp_post_reduce_scatter


def report(
    pre: Any,
    post: Any,
    world_sizes: tuple[int, ...] = (2,),
    shapes: tuple[tuple[int, int], ...] = ((8, 4),),
) -> Any:
    kind = type("Sends", (Int8Gradients,), {PRE: pre, POST: post})
    return check_extension(
        lambda shape: kind(torch.randn(shape)),
        world_sizes=world_sizes,
        shapes=shapes,
        tolerance=0.01,
        skip=SKIP,
        strict=False,
    )


def test_int8_with_error_feedback_passes_on_any_number_of_ranks() -> None:
    found = report(right_pre, right_post, (1, 4), ((5, 4),))
    assert found.ok, str(found)
    assert [finding.check for finding in found][5:8] == CHECKS


@pytest.mark.matrix
def test_the_example_passes_the_whole_kit() -> None:
    found = check_extension(
        lambda shape: Int8Gradients(torch.randn(shape)),
        world_sizes=(3,),
        shapes=[(5, 4)],
        tolerance=0.03,
    )
    assert len(found.findings) == 16


def half_of_odd_ranks(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad.half() if dist.get_rank() % 2 else grad,), None


def post(decode: Any) -> Any:
    """Return a second hook that fills ``out`` with what ``decode`` makes of what arrived."""

    def hook(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
        out.copy_(decode(received[0], metadata))

    return hook


total = post(lambda rows, metadata: rows.sum(0))
WHERE = " (2 ranks, shape [8, 4])"
SENT, SUMMED, NONE = CHECKS
# What the first hook returns, the second one, the check that fails, and what it says.
FAULTS: dict[str, tuple[Any, Any, str, str]] = {
    "no metadata": (
        lambda self, grad, mesh: grad,
        total,
        SENT,
        f"Expected {PRE} of weight to return (tensors, metadata), got Tensor",
    ),
    "rows first": (
        lambda self, grad, mesh: ((grad.t(),), None),
        total,
        SENT,
        f"Expected {PRE} of weight to return tensors with a row for each of 2 ranks, got [[16, 2]]",
    ),
    "half of odd ranks": (
        half_of_odd_ranks,
        total,
        SENT,
        f"Expected {PRE} to return the same dtypes and shapes on all ranks and each time, got "
        "[torch.float32 [16]] on rank 0 and [torch.float16 [16]] on rank 1",
    ),
    "fails": (
        lambda self, grad, mesh: {}["scale"],
        total,
        SENT,
        "Expected no error, got KeyError on rank 0: 'scale'",
    ),
    "halves": (
        lambda self, grad, mesh: ((grad / 2,), None),
        total,
        SUMMED,
        "Expected the mean of 8 reductions to be the sum over ranks, got values that are off by "
        "5.0e-01 of the largest, where 0.01 is allowed",
    ),
    "returns it": (
        lambda self, grad, mesh: ((grad,), None),
        lambda self, received, metadata, out: received[0].sum(0),
        SUMMED,
        f"Expected {POST} to fill out, 16 elements, got some that it left; write into it",
    ),
    "bits": (
        lambda self, grad, mesh: ((grad.view(torch.int32),), None),
        post(lambda rows, metadata: rows.view(torch.float32).sum(0)),
        SUMMED,
        "Expected no error, got RuntimeError on rank 0: The size of tensor a (16) must match the "
        "size of tensor b (8) at non-singleton dimension 0",
    ),
    "asks shape": (
        lambda self, grad, mesh: ((grad.flatten(1),), grad.shape),
        post(lambda rows, metadata: rows.sum(0).view(metadata[1:])),
        NONE,
        f"Expected {POST} to work on a rank that never had a gradient, whose metadata is None, got "
        "TypeError: 'NoneType' object is not subscriptable",
    ),
    "shifted": (
        lambda self, grad, mesh: ((grad + 1,), None),
        post(lambda rows, metadata: (rows - 1).sum(0)),
        NONE,
        f"Expected {POST} to make zeros of zero bytes, got values up to 2; a rank without a "
        "gradient sends zero bytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_said(fault: str) -> None:
    pre, post, check, sentence = FAULTS[fault]
    (failure,) = report(pre, post).failures
    assert failure == (check, False, sentence + WHERE)
