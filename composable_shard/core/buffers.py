"""Buffers under mixed precision: cast during forward, kept in their own dtype otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class CastBuffers:
    """Lends modules their floating-point buffers in another dtype while forward runs.

    What forward wrote to a lent buffer is copied back when it ends. Elements that it did not write
    keep their own precision.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._modules = list(modules) if dtype is not None else []
        self._dtype = dtype
        self._lent: list[tuple[nn.Module, str, torch.Tensor]] = []

    def cast(self) -> None:
        """Lend the buffers; does nothing while they are lent."""
        if self._lent or not self._modules:
            return
        for module in self._modules:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer.dtype != self._dtype:
                    module._buffers[name] = buffer.to(self._dtype)
                    self._lent.append((module, name, buffer))

    @torch.no_grad()
    def restore(self) -> None:
        """Take the lent buffers back."""
        for module, name, buffer in self._lent:
            lent = module._buffers[name]
            if lent is not None and lent.shape == buffer.shape:
                # batch norm writes its statistics without moving their version counters
                written = lent != buffer.to(self._dtype)
                buffer.copy_(torch.where(written, lent.to(buffer.dtype), buffer))
            module._buffers[name] = buffer
        self._lent.clear()
