"""How the elements of one parameter lie in flat buffers, and its rows there.

A flat buffer holds a tensor in the order in which its elements lie in memory. So a transposed or
channels-last parameter is cut, gathered and reduced without a permuting copy, and keeps its
strides. A scalar has no rows: it is laid out as one equal row for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_shard import _torch
from composable_shard.core_next.layout import ParamLayout
from composable_shard.errors import ExtensionError

# How a tensor of any shape and stride lies in flat buffers ----------------------------------------


@dataclass(frozen=True)
class TensorLayout:
    """The rows of one tensor, cut along one dim.

    Attributes:
        shape: The shape of the tensor that users see.
        dim: Its sharded dim; ``None`` for a scalar, which every rank holds.
        order: Its dims by falling stride; ``None`` if they already fall.
        param: How the rows are cut, with dims in the order of memory.
    """

    shape: tuple[int, ...]
    dim: int | None
    order: tuple[int, ...] | None
    param: ParamLayout

    @property
    def layout(self) -> ParamLayout:
        """The name of ``param`` in `codec.py`."""
        return self.param

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a whole tensor, or a local shard, with its dims in the order of memory."""
        if self.dim is None:
            return tensor.expand(self.param.num_shards)
        return tensor if self.order is None else tensor.permute(self.order)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """View the first elements of a flat buffer as the whole tensor."""
        if self.dim is None:
            return flat[0]
        return self._in_user_order(flat[: self.param.numel].view(self.param.shape))

    def local(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """View the first elements of a flat buffer as the local shard of ``rank``."""
        if self.dim is None:
            return flat[0]
        numel = self.param.local_numel(rank)
        return self._in_user_order(flat[:numel].view(self.param.local_shape(rank)))

    def shard_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View the rows of ``rank`` in a whole tensor."""
        if self.dim is None:
            return tensor
        layout = self.param
        if _torch.is_subclass(tensor):
            # torch's fully_shard calls chunk, so subclasses implement it; few know narrow.
            shards = tensor.chunk(layout.num_shards, self.dim)
            self._check(shards)
            if rank < len(shards):
                return shards[rank]
        return tensor.narrow(self.dim, layout.start(rank), layout.local_rows(rank))

    def _check(self, shards: Sequence[torch.Tensor]) -> None:
        """Raise ``ExtensionError`` if a subclass splits itself unlike a plain tensor."""
        dim, count = self.dim, self.param.num_nonempty
        assert dim is not None
        rows = [self.param.local_rows(rank) for rank in range(max(count, len(shards)))]
        expected = [(*self.shape[:dim], num, *self.shape[dim + 1 :]) for num in rows]
        found = [tuple(shard.shape) for shard in shards]
        if found != expected:
            kind = type(shards[0]).__name__ if shards else "nothing"
            raise ExtensionError(
                f"Expected split to return shapes {list(map(list, expected))}, got "
                f"{list(map(list, found))} of {kind}"
            )

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a whole tensor to its padded shards, one a row: [num_shards, shard_numel]."""
        layout = self.param
        stack = tensor.new_zeros((layout.num_shards, layout.shard_numel))
        for whole, shards in matching_pieces(layout, self.rows(tensor).reshape(-1), stack):
            shards.copy_(whole)
        return stack

    def new_zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a whole tensor of zeros, of the class and on the device of ``like``."""
        if self.order is None:
            return like.new_zeros(self.shape, dtype=dtype)
        return self.whole(like.new_zeros(self.param.numel, dtype=dtype))

    def _in_user_order(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return rows
        inverse = [0] * len(self.order)
        for place, dim in enumerate(self.order):
            inverse[dim] = place
        return rows.permute(inverse)


def plan_tensor(tensor: torch.Tensor, dim: int | None, num_shards: int) -> TensorLayout:
    """Plan how a tensor is laid out in flat buffers.

    Args:
        tensor: Its shape and strides count. A tensor that is not dense in any order of its dims is
            laid out contiguously.
        dim: The dim to cut; ``None`` for a scalar.
        num_shards: The number of shards.
    """
    shape = tuple(tensor.shape)
    if dim is None:
        return TensorLayout(shape, None, None, ParamLayout((num_shards,), 0, num_shards))
    order = None if tensor.is_contiguous() else _order(tensor)
    if order is None:
        return TensorLayout(shape, dim, None, ParamLayout(shape, dim, num_shards))
    in_memory = tuple(shape[place] for place in order)
    return TensorLayout(shape, dim, order, ParamLayout(in_memory, order.index(dim), num_shards))


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims by falling stride if the tensor is dense in that order."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def matching_pieces(
    layout: ParamLayout, full: torch.Tensor, shards: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair views of a whole parameter with views of its shards.

    Copying one side to the other converts between the two forms, whatever the sharded dim; neither
    side holds padding.

    Args:
        layout: How the parameter is cut.
        full: The parameter, flat, [numel] or longer.
        shards: Its padded shards, one a row, [num_shards, shard_numel].
    """
    num_full, per_shard = layout.num_full, layout.rows_per_shard
    whole = full[: layout.numel].view(layout.outer, layout.num_rows, layout.inner)
    pieces = []
    if num_full:
        rows = whole[:, : num_full * per_shard]
        rows = rows.unflatten(1, (num_full, per_shard)).transpose(0, 1)
        stacked = shards[:num_full].view(num_full, layout.outer, per_shard, layout.inner)
        pieces.append((rows, stacked))
    rest = layout.num_rows - num_full * per_shard
    if rest:
        numel = layout.outer * rest * layout.inner
        last = shards[num_full, :numel].view(layout.outer, rest, layout.inner)
        pieces.append((whole[:, -rest:], last))
    return pieces
