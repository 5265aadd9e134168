"""What a rank holds of a model, bit by bit."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard.train.full import same_bits


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank holds of each parameter and buffer."""
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def differences(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Tell which tensors are not the same in every bit."""
    assert got.keys() == wanted.keys()
    return [
        name
        for name in wanted
        if got[name].shape != wanted[name].shape
        or got[name].dtype != wanted[name].dtype
        or not same_bits(got[name], wanted[name])
    ]
