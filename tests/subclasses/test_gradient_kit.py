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
    found = report(right_pre, right_post, (1, 2, 3, 4), ((8, 4), (5, 4)))
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


def no_metadata(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return grad


def rows_first(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad.t(),), None


def half_of_odd_ranks(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad.half() if dist.get_rank() % 2 else grad,), None


def halves(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad / 2,), None


def whole(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad,), None


def fails(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    raise KeyError("scale")


def total(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_(received[0].sum(0))


def returns_it(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> Any:
    return received[0].sum(0)


def shifted(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad + 1,), None


def shifts_back(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_((received[0] - 1).sum(0))


def tells_shape(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad.flatten(1),), grad.shape


def asks_shape(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_(received[0].sum(0).view(metadata[1:]))


def bits(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad.view(torch.int32),), None


def from_bits(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_(received[0].view(torch.float32).sum(0))


WHERE = " (2 ranks, shape [8, 4])"
FAULTS = {
    no_metadata: (
        total,
        "gradient sent",
        f"Expected {PRE} of weight to return (tensors, metadata), got Tensor",
    ),
    rows_first: (
        total,
        "gradient sent",
        f"Expected {PRE} of weight to return tensors with a row for each of 2 ranks, got [[16, 2]]",
    ),
    half_of_odd_ranks: (
        total,
        "gradient sent",
        f"Expected {PRE} to return the same dtypes and shapes on all ranks and each time, got "
        "[torch.float32 [16]] on rank 0 and [torch.float16 [16]] on rank 1",
    ),
    fails: (total, "gradient sent", "Expected no error, got KeyError on rank 0: 'scale'"),
    halves: (
        total,
        "gradient summed",
        "Expected the mean of 8 reductions to be the sum over ranks, got values that are off by "
        "5.0e-01 of the largest, where 0.01 is allowed",
    ),
    whole: (
        returns_it,
        "gradient summed",
        f"Expected {POST} to fill out, 16 elements, got some that it left; write into it",
    ),
    bits: (
        from_bits,
        "gradient summed",
        "Expected no error, got RuntimeError on rank 0: The size of tensor a (16) must match the "
        "size of tensor b (8) at non-singleton dimension 0",
    ),
    tells_shape: (
        asks_shape,
        "no gradient",
        f"Expected {POST} to work on a rank that never had a gradient, whose metadata is None, got "
        "TypeError: 'NoneType' object is not subscriptable",
    ),
    shifted: (
        shifts_back,
        "no gradient",
        f"Expected {POST} to make zeros of zero bytes, got values up to 2; a rank without a "
        "gradient sends zero bytes",
    ),
}


@pytest.mark.parametrize("pre", FAULTS, ids=lambda pre: pre.__name__)
def test_what_is_wrong_is_said(pre: Any) -> None:
    post, check, sentence = FAULTS[pre]
    (failure,) = report(pre, post).failures
    assert failure == (check, False, sentence + WHERE)
