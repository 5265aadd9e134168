"""Where shards arrive that do not arrive in place, and how they are copied out.

Parameters that are sharded on an inner dim come as shards laid end to end; small ones share a
message. The views are made once; the storage comes with every gather and goes with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange

from composable_shard import _torch
from composable_shard.core.params.layout import BucketLayout, ParamLayout


class Staging:
    """The messages of one bucket that are copied out on arrival.

    Args:
        layout: Of the bucket.
        regions: By index, where each of those parameters belongs, flat.
        fuses: Whether one kernel copies all packed parameters out, instead of one copy for each.

    Attributes:
        messages: The buffers to receive, in the order of the layout, [num_shards * n] each.
    """

    def __init__(
        self, layout: BucketLayout, regions: Mapping[int, torch.Tensor], *, fuses: bool
    ) -> None:
        like = next(iter(regions.values()))
        self._flat = _torch.empty(layout.staging_numel, dtype=like.dtype, device=like.device)
        self.messages = list(self._flat.split_with_sizes(layout.staged_numels))
        pieces = [
            piece
            for index, message in zip(layout.permuted, self.messages, strict=False)
            for piece in matching_pieces(layout.params[index], regions[index], message)
        ]
        self._packed: torch.Tensor | None = None
        self._numels = layout.packed_shard_numels
        if layout.packed_numel:
            packed = self.messages[-1].view(layout.num_shards, -1)
            unpacked = [regions[index].view(layout.num_shards, -1) for index in layout.packed]
            if fuses:
                count = layout.num_packed_shards
                self._packed = packed[:count]
                self._unpacked = [rows[:count] for rows in unpacked]
            else:
                columns = packed.split_with_sizes(self._numels, dim=1)
                counts = [layout.params[index].num_nonempty_shards for index in layout.packed]
                for rows, column, count in zip(unpacked, columns, counts, strict=True):
                    pieces.append((rows[:count], column[:count]))
        self._into = [full for full, _ in pieces]
        self._sources = [shards for _, shards in pieces]

    def allocate(self) -> None:
        """Have the memory to receive into."""
        _torch.allocate(self._flat)

    def copy_out(self) -> None:
        """Put what has arrived into place."""
        if self._into:
            _torch.copy_all_(self._into, self._sources)
        if self._packed is not None:
            torch.split_with_sizes_copy(self._packed, self._numels, dim=1, out=self._unpacked)

    def free(self) -> None:
        """Free the memory."""
        _torch.free(self._flat)


def fuses_on(device: torch.device) -> bool:
    """Tell whether one kernel copies packed parameters out: where each copy costs a launch."""
    return device.type != "cpu"


def matching_pieces(
    layout: ParamLayout, full: torch.Tensor, shards: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair views of a whole parameter with views of its shards laid end to end.

    Copying one side to the other turns one form into the other, whatever the sharded dim; padding
    is touched by neither.

    Args:
        layout: How the parameter is cut.
        full: The parameter, flat, [numel] or longer.
        shards: Its shards, flat, [num_shards * shard_numel].
    """
    count, rest = layout.num_full_shards, layout.num_remaining_rows
    whole = full[: layout.numel].view(layout.outer, layout.rows, layout.inner)
    stacked = shards.view(layout.num_shards, layout.shard_numel)
    pieces = []
    if count:
        rows = count * layout.rows_per_shard
        pieces.append(
            (
                rearrange(
                    whole[:, :rows], "outer (shard row) inner -> shard outer row inner", shard=count
                ),
                stacked[:count].view(count, layout.outer, layout.rows_per_shard, layout.inner),
            )
        )
    if rest:
        numel = layout.outer * rest * layout.inner
        pieces.append(
            (
                whole[:, layout.rows - rest :],
                stacked[count, :numel].view(layout.outer, rest, layout.inner),
            )
        )
    return pieces
