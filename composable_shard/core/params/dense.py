"""How a tensor of any shape and stride becomes rows that can be cut, and back.

A flat buffer holds a tensor in the order in which its elements lie in memory, so a transposed or
channels-last parameter is cut, gathered and reduced without a permuting copy and keeps its strides.
A scalar has nothing to cut: it is laid out as one equal row for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_shard import _torch
from composable_shard.core.params.layout import ParamLayout
from composable_shard.errors import ExtensionError


@dataclass(frozen=True)
class DenseForm:
    """The rows of one tensor, cut along one dim.

    Attributes:
        shape: Shape of the tensor that users see.
        dim: Its sharded dim; ``None`` for a scalar, which every rank holds.
        order: Its dims by falling stride; ``None`` where that is how they are numbered.
        layout: How the rows are cut, with dims in the order of memory.
    """

    shape: tuple[int, ...]
    dim: int | None
    order: tuple[int, ...] | None
    layout: ParamLayout

    @property
    def is_replicated(self) -> bool:
        return self.dim is None

    @property
    def is_plain(self) -> bool:
        """Whether the rows of a whole tensor are the tensor itself."""
        return self.dim is not None and self.order is None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a whole tensor, or a local shard, with its dims in the order of memory."""
        if self.dim is None:
            return tensor.expand(self.layout.num_shards)
        return tensor if self.order is None else tensor.permute(self.order)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """View the first elements of a flat buffer as the whole tensor."""
        if self.dim is None:
            return flat[0]
        return self._restored(flat[: self.layout.numel].view(self.layout.shape))

    def local(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """View the first elements of a flat buffer as the local shard of ``rank``."""
        if self.dim is None:
            return flat[0]
        numel = self.layout.local_numel(rank)
        return self._restored(flat[:numel].view(self.layout.local_shape(rank)))

    def shard_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View the rows of ``rank`` in a whole tensor."""
        if self.dim is None:
            return tensor
        layout = self.layout
        if _torch.is_subclass(tensor):
            # What torch's fully_shard calls, so that subclasses implement it; not all know narrow.
            shards = tensor.chunk(layout.num_shards, self.dim)
            self._check(shards)
            if rank < len(shards):
                return shards[rank]
        return tensor.narrow(self.dim, layout.start(rank), layout.local_rows(rank))

    def _check(self, shards: Sequence[torch.Tensor]) -> None:
        """Raise ``ExtensionError`` if a class has cut itself otherwise than a plain tensor is."""
        dim, count = self.dim, self.layout.num_nonempty_shards
        assert dim is not None
        rows = [self.layout.local_rows(rank) for rank in range(max(count, len(shards)))]
        expected = [(*self.shape[:dim], num, *self.shape[dim + 1 :]) for num in rows]
        found = [tuple(shard.shape) for shard in shards]
        if found != expected:
            kind = type(shards[0]).__name__ if shards else "nothing"
            raise ExtensionError(
                f"Expected split to return shapes {list(map(list, expected))}, got "
                f"{list(map(list, found))} of {kind}"
            )

    def new_zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a whole tensor of zeros, of the kind and on the device of ``like``."""
        if self.order is None:
            return like.new_zeros(self.shape, dtype=dtype)
        return self.whole(like.new_zeros(self.layout.numel, dtype=dtype))

    def _restored(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return rows
        inverse = [0] * len(self.order)
        for place, dim in enumerate(self.order):
            inverse[dim] = place
        return rows.permute(inverse)


def plan_dense(tensor: torch.Tensor, dim: int | None, num_shards: int) -> DenseForm:
    """Plan how a tensor, such as the local tensor of a parameter, is laid out in flat buffers.

    Args:
        tensor: Its shape and strides count. Where it is not dense in any order of its dims, it is
            laid out contiguously.
        dim: The dim to cut; ``None`` for a scalar.
        num_shards: Into how many pieces.
    """
    shape = tuple(tensor.shape)
    if dim is None:
        return DenseForm(shape, None, None, ParamLayout((num_shards,), 0, num_shards))
    order = None if tensor.is_contiguous() else _order(tensor)
    if order is None:
        return DenseForm(shape, dim, None, ParamLayout(shape, dim, num_shards))
    in_memory = tuple(shape[place] for place in order)
    return DenseForm(shape, dim, order, ParamLayout(in_memory, order.index(dim), num_shards))


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims by falling stride if the tensor is dense in that order."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None
