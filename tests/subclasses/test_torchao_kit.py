"""What the kit says of the tensor subclasses of torchao."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is not installed; it comes with the extra 'test'")

from torch import nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from composable_shard.testing.extension_kit import check_extension
from subclasses.torchao_layers import QUANTIZE

Shape = tuple[int, ...]
UNKNOWN = "Expected no error, got NotImplementedError on rank 0: {} dispatch: attempting to run"
DTYPE = (
    "Expected fsdp_post_all_gather to return a tensor of param_dtype, torch.bfloat16, got "
    "torch.float32 (2 ranks, shape [64, 64])"
)
EMPTY = "Expected no error, got RuntimeError on rank 2: max(): Expected reduction dim"


def of_kind(kind: str) -> Any:
    def make(shape: Shape) -> torch.Tensor:
        layer = QUANTIZE[kind](nn.Linear(shape[1], shape[0], bias=False))
        return layer.weight.detach()

    return make


def with_emulated_float8(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, Float8TrainingTensor):
        weight = weight.to_original_precision()
    return torch.nn.functional.linear(x, weight)


def with_inner(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight._data)


INT8 = "Int8QuantizedTrainingLinearWeight"
FLOAT8 = {"compute": with_emulated_float8, "tolerance": 0.1, "shapes": [(8, 16)]}
CASES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("int8 mixed", {"tolerance": 0.05}, {}),
    ("moe float8", {"compute": with_inner}, {}),
    ("moe mxfp8", {"compute": with_inner}, {}),
    (
        "int8",
        {},
        {"meta device": UNKNOWN.format(INT8), "full state dict": UNKNOWN.format(INT8)},
    ),
    ("float8", FLOAT8, {}),
    ("float8", {**FLOAT8, "shapes": [(2, 16)], "world_sizes": [3]}, {"sent": EMPTY}),
    ("nf4", {"shapes": [(64, 64)]}, {"gathered": DTYPE}),
]


@pytest.mark.brief(3)
@pytest.mark.parametrize(("kind", "arguments", "failures"), CASES)
def test_what_fails(kind: str, arguments: dict[str, Any], failures: dict[str, str]) -> None:
    settings = {"world_sizes": [2], "trains": False, "strict": False, **arguments}
    report = check_extension(of_kind(kind), **settings)
    assert [finding.check for finding in report.failures] == list(failures), str(report)
    for finding in report.failures:
        assert finding.sentence.startswith(failures[finding.check])
