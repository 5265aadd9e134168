"""Buffers under mixed precision: cast during forward, kept in their own dtype otherwise.

Only a policy with ``buffer_dtype`` casts them. Without it the statistics of a batch norm stay as
precise as they are, and its weights, which torch demands in the same dtype, are lent in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from composable_shard import _torch


class CastBuffers:
    """Lends modules their floating-point buffers in another dtype while forward runs.

    What forward wrote to a lent buffer is copied back when it ends. Elements that it did not write
    keep their own precision.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._modules = list(modules) if dtype is not None else []
        self._dtype = dtype
        self._lent: list[tuple[nn.Module, str, torch.Tensor]] = []

    @property
    def may_lend(self) -> bool:
        """Whether there is anything it could ever lend."""
        return bool(self._modules)

    def lend(self) -> None:
        """Lend the buffers."""
        for module in self._modules:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer.dtype != self._dtype:
                    module._buffers[name] = buffer.to(self._dtype)
                    self._lent.append((module, name, buffer))

    @torch.no_grad()
    def take_back(self) -> None:
        """Take the lent buffers back."""
        for module, name, buffer in self._lent:
            lent = module._buffers[name]
            if lent is not None and lent.shape == buffer.shape:
                # batch norm writes its statistics without moving their version counters
                written = lent != buffer.to(self._dtype)
                buffer.copy_(torch.where(written, lent.to(buffer.dtype), buffer))
            module._buffers[name] = buffer
        self._lent.clear()


class PreciseNormWeights:
    """Lends batch norms their weights in the dtype of their running statistics while forward runs.

    Batch norm takes inputs of a lower precision than its statistics, but no weights of one.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._norms = [module for module in modules if _torch.is_batch_norm(module)]
        self._lent: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []

    @property
    def may_lend(self) -> bool:
        """Whether there is anything it could ever lend."""
        return bool(self._norms)

    def lend(self) -> None:
        """Lend the weights; gradients reach the parameters through the cast."""
        for norm in self._norms:
            statistics = norm._buffers.get("running_mean")
            if statistics is None:
                continue
            for name, param in norm._parameters.items():
                if param is not None and param.dtype != statistics.dtype:
                    cast = param.to(statistics.dtype)
                    norm._parameters[name] = cast  # type: ignore[assignment]
                    self._lent.append((norm, name, param, cast))

    def take_back(self) -> None:
        """Register the parameters again, but where others have been registered meanwhile."""
        for norm, name, param, cast in self._lent:
            if norm._parameters.get(name) is cast:
                norm._parameters[name] = param
        self._lent.clear()
