"""Collectives of a user's own, written in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import AllGather, ReduceScatter


class Allocating:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CopyingAllGather(Allocating, AllGather):
    def __init__(self) -> None:
        self.allocated: list[int] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated.append(torch.Size(size).numel())
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)


class SummingReduceScatter(Allocating, ReduceScatter):
    """Reduces by summing everything everywhere."""

    def __init__(self) -> None:
        self.ops: list[Any] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.ops.append(op)
        work = dist.all_reduce(input_tensor, op, group=group, async_op=True)
        work.wait()
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
