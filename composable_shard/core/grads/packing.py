"""Small gradients side by side, one row for each shard, with the flags behind them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from composable_shard import _torch
from composable_shard.core.grads.flags import Flags
from composable_shard.core.params.layout import BucketLayout, ParamLayout


class PackedGrads:
    """Packs gradients of one bucket for one message.

    Args:
        layout: Where they lie.
        num_flags: How many flags travel with them.
        dtype: Dtype of the message.
        device: Where it is made.
        fuses: Whether one kernel packs all; if not, what is there is copied one by one. A copy
            costs a launch on a device, and little more than its bytes on the CPU.
    """

    def __init__(
        self,
        layout: BucketLayout,
        num_flags: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fuses: bool,
    ) -> None:
        self._layout = layout
        self._flags = Flags(layout.num_shards, device)
        self._indices = [i for i in layout.packed if layout.params[i].numel]
        self._shape = (layout.num_shards, layout.packed_numel + num_flags)
        self._dtype = dtype
        self._device = device
        self._fuses = fuses
        self._places: list[_Place] = []
        start = 0
        for index in self._indices:
            param = layout.params[index]
            self._places.append(_place(param, start, self._shape[1]))
            start += param.shard_numel

    def pack(self, grads: Sequence[torch.Tensor | None], present: list[bool]) -> torch.Tensor:
        """Return [num_shards * (packed_numel + num_flags)], padding as the memory was.

        Args:
            grads: The gradients of the bucket; ``None`` counts as zeros.
            present: Which flags to set.
        """
        rows = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        members = [grads[index] for index in self._indices]
        if self._fuses:
            self._concatenate(rows, members, present)
        else:
            self._copy(rows, members, present)
        return rows.view(-1)

    def _copy(
        self, rows: torch.Tensor, members: list[torch.Tensor | None], present: list[bool]
    ) -> None:
        """Copy what is there and leave the padding alone."""
        into = [rows[:, self._layout.packed_numel :]]
        sources = [self._flags.rows(self._dtype, present)]
        for place, grad in zip(self._places, members, strict=True):
            regions = [rows.as_strided(*region) for region in place.regions]
            if grad is None:
                for region in regions:
                    region.zero_()
            else:
                into += regions
                sources += place.cut(grad)
        _torch.copy_all_(into, sources)

    def _concatenate(
        self, rows: torch.Tensor, members: list[torch.Tensor | None], present: list[bool]
    ) -> None:
        """Pad, cast and pack in one kernel."""
        dtypes = {grad.dtype for grad in members if grad is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else self._dtype
        parts = [
            self._as_rows(self._layout.params[index], grad, dtype)
            for index, grad in zip(self._indices, members, strict=True)
        ]
        _torch.chunk_cat_into(rows, [*parts, self._flags.rows(dtype, present)])

    def _as_rows(
        self, param: ParamLayout, grad: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a packed gradient, cut along dim 0 whatever its other dims."""
        if grad is None:
            return torch.zeros(param.rows, param.inner, dtype=dtype, device=self._device)
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        return grad if param.dim == 0 else grad.reshape(param.rows, param.inner)


_Region = tuple[tuple[int, ...], tuple[int, ...], int]


class _Place(NamedTuple):
    """Where one gradient lies in the rows.

    Attributes:
        regions: Shape, strides and offset of its elements there, without padding.
        numels: Elements of each region, if the gradient has to be cut for them.
    """

    regions: list[_Region]
    numels: list[int]

    def cut(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """View a gradient as the regions are shaped."""
        if not self.numels:
            return [grad]
        parts = grad.reshape(-1).split_with_sizes(self.numels)
        return [part.view(region[0]) for part, region in zip(parts, self.regions, strict=True)]


def _place(layout: ParamLayout, start: int, width: int) -> _Place:
    """Plan where a gradient lies in rows of ``width`` elements, in each of them from ``start``.

    One row of the gradient in each row is the gradient as it is. Otherwise it is cut into the rows
    that are full and the rest.
    """
    if layout.rows_per_shard == 1:
        strides = list(torch.empty(layout.shape, device="meta").stride())
        strides[layout.dim] = width
        return _Place([(layout.shape, tuple(strides), start)], [])
    count, rest = layout.num_full_shards, layout.num_remaining_rows * layout.inner
    regions: list[_Region] = []
    if count:
        regions.append(((count, layout.shard_numel), (width, 1), start))
    if rest:
        regions.append(((rest,), (1,), count * width + start))
    return _Place(regions, [prod(shape) for shape, _, _ in regions])
