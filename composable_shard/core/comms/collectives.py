"""All-gather and reduce-scatter of many tensors in one launch.

They return at once; waiting is :class:`~composable_shard.core.comms.streams.Pending`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.comms.streams import Waitable

Tensors = list[torch.Tensor]


class AllGatherLaunch(Protocol):
    """Gathers many tensors at once."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        """Launch the all-gather of each input [n] into its output [N * n].

        Args:
            outputs: What to write.
            inputs: What to send.
            group: The ranks.
            tag: A number on which the ranks have agreed, to tell these messages from others.
        """


class ReduceScatterLaunch(Protocol):
    """Reduces many tensors at once.

    Attributes:
        widens: Whether an input may be of a narrower dtype than its output, in which it is summed;
            another one on each rank.
        divides: Whether it divides a sum by any number before it is rounded.
        reads_padding: Whether it may look at an input as a whole, so that padding must be zeros.
    """

    widens: bool = False
    divides: bool = False
    reads_padding: bool = False

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Tell whether ``op`` may be ``ReduceOp.AVG``."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int
    ) -> list[Waitable]:
        """Launch the reduce-scatter of each input [N * n] into its output [n]; see all-gather.

        Args:
            outputs: What to write.
            inputs: What to send.
            group: The ranks.
            op: A ``ReduceOp``, or, if it ``divides``, the number to divide the sum by.
            tag: See all-gather.
        """


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return in what to add tensors of ``dtype``, that their sum is rounded to it only once."""
    is_half = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_half else dtype


class CoalescedAllGather(AllGatherLaunch):
    """One c10d launch for all tensors."""

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        tag: int,
    ) -> list[Waitable]:
        if len({tensor.dtype for tensor in inputs}) > 1:
            outputs, inputs = _as_bytes(outputs), _as_bytes(inputs)
        return [_torch.all_gather_flat(outputs, inputs, group)]


class CoalescedReduceScatter(ReduceScatterLaunch):
    """One c10d launch for all tensors."""

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return _torch.average_is_supported(_torch.backend_name(group, device))

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        op: Any,
        tag: int,
    ) -> list[Waitable]:
        return [_torch.reduce_scatter_flat(outputs, inputs, group, op)]


def _as_bytes(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [tensor.view(torch.uint8) for tensor in tensors]
