"""Linear layers whose weights are the tensor subclasses of torchao, on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor
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


class MoeLinear(nn.Linear):
    """Multiplies what the wrapper wraps: its own products are of CUDA kernels alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Unwrapped.apply(x, self.weight) + self.bias


class Unwrapped(torch.autograd.Function):
    """A product with the inner tensor of a wrapped weight."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert type(weight) is Float8TrainingWeightWrapperTensor
        ctx.save_for_backward(x, weight._data)
        return x @ weight._data.T

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, inner = ctx.saved_tensors
        return grad @ inner, grad.T @ x


def moe_weight(layer: nn.Linear) -> nn.Module:
    layer.__class__ = MoeLinear
    wrapped = Float8TrainingWeightWrapperTensor(layer.weight.detach(), Float8TrainingOpConfig())
    return with_weight(layer, wrapped)


def nf4_weight(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
    return layer


QUANTIZE = {
    "int8": int8_weight_only,
    "int8 mixed": int8_mixed,
    "bitnet": bitnet_weight,
    "float8": float8_weight,
    "float8 ahead": float8_weight,
    "moe": moe_weight,
    "nf4": nf4_weight,
}


def model_of(kind: str, rows: int, columns: int = 16) -> nn.Sequential:
    """Two layers, the first of them quantized; the same values on every rank."""
    torch.manual_seed(0)
    first = QUANTIZE[kind](nn.Linear(columns, rows))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(rows, 4))


@torch.no_grad()
def agree_on_scales(model: nn.Module) -> None:
    """Set the scale of BitNet weights to the mean over all ranks, which its hook takes by AVG.

    Gloo has no AVG, and the mean of the means of shards is not that of the whole if they differ in
    rows.
    """
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else None
        if isinstance(local, bitnet.BitNetTrainingLinearWeight):
            total = local._data.abs().sum()
            dist.all_reduce(total)
            param._local_tensor._precomputed_scale = total / param.numel()
