"""Linear layers whose weights are the tensor subclasses of torchao, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import (
    Float8TrainingOpConfig,
    MXFP8TrainingOpConfig,
    MXFP8TrainingRecipe,
)
from torchao.prototype.moe_training.tensor import (
    Float8TrainingWeightWrapperTensor,
    MXFP8TrainingWeightWrapperTensor,
)
from torchao.prototype.quantized_training import bitnet, int8, int8_mixed_precision
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4


def nearest_int8(tensor: torch.Tensor, stochastic_rounding: bool = False, eps: float = 1e-12):
    """Quantize rows to int8 without chance, so that two trainings can be compared."""
    del stochastic_rounding
    scale = tensor.abs().amax(1) / 127
    rows = (tensor.float() / scale.float().clip(eps).view(-1, 1)).round()
    return rows.clip(-128, 127).to(torch.int8), scale


def with_weight(layer: nn.Linear, weight: torch.Tensor) -> nn.Linear:
    layer.weight = nn.Parameter(weight, requires_grad=weight.dtype.is_floating_point)
    return layer


def int8_weight_only(layer: nn.Linear) -> nn.Module:
    int8.quantize_int8_rowwise = nearest_int8
    weight = int8.Int8QuantizedTrainingLinearWeight.from_float(layer.weight.detach())
    return with_weight(layer, weight)


def int8_mixed(layer: nn.Linear) -> nn.Module:
    config = int8_mixed_precision.Int8MixedPrecisionTrainingConfig()
    kind = int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight
    return with_weight(layer, kind(layer.weight.detach(), config))


def bitnet_weight(layer: nn.Linear) -> nn.Module:
    return with_weight(layer, bitnet.BitNetTrainingLinearWeight(layer.weight.detach()))


def float8_weight(layer: nn.Linear) -> nn.Module:
    """The weight is gathered in float8 (as bytes on gloo), and multiplied in an emulation."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(nn.Sequential(layer), config=config)[0]


def moe_float8_weight(layer: nn.Linear) -> nn.Module:
    """The weight is wrapped; its products round both factors to float8, row by row."""
    wrapped = Float8TrainingWeightWrapperTensor(layer.weight.detach(), Float8TrainingOpConfig())
    return with_weight(layer, wrapped)


def moe_mxfp8_weight(layer: nn.Linear) -> nn.Module:
    """The same in blocks of 32, emulated; it ignores a bias."""
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    layer.bias = None
    return with_weight(layer, MXFP8TrainingWeightWrapperTensor(layer.weight.detach(), config))


def nf4_weight(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
    return layer


QUANTIZE = {
    "int8": int8_weight_only,
    "int8 mixed": int8_mixed,
    "bitnet": bitnet_weight,
    "bitnet ahead": bitnet_weight,
    "float8": float8_weight,
    "float8 ahead": float8_weight,
    "moe float8": moe_float8_weight,
    "moe mxfp8": moe_mxfp8_weight,
    "nf4": nf4_weight,
}

NUM_BLOCKS = 4


class Block(nn.Module):
    """A quantized layer and a plain one."""

    def __init__(self, kind: str, rows: int, columns: int) -> None:
        super().__init__()
        self.quantized = QUANTIZE[kind](nn.Linear(columns, rows))
        self.plain = nn.Linear(rows, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.plain(self.quantized(x).tanh())


def model_of(kind: str, rows: int, columns: int) -> nn.Sequential:
    """Make some blocks and a head; the same values on every rank."""
    torch.manual_seed(0)
    blocks = [Block(kind, rows, columns) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(columns, 4))


@contextmanager
def averages_by_sum() -> Iterator[None]:
    """Let the hook of BitNet weights, which averages scales over all ranks, do so on gloo.

    Gloo has no AVG.
    """

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.AVG
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())

    namespace = SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp)
    with mock.patch.object(bitnet, "dist", namespace):
        yield


@torch.no_grad()
def agree_on_scales(model: nn.Module) -> None:
    """Set the scales of BitNet weights ahead, as torchao does where there is an AVG.

    The mean of the means of shards is not that of the whole if they differ in rows.
    """
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else None
        if isinstance(local, bitnet.BitNetTrainingLinearWeight):
            total = local._data.abs().sum()
            mesh = param.device_mesh
            dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
            param._local_tensor._precomputed_scale = total / param.numel()
