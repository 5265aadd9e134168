"""Which ranks have which gradients: a number for each, 1 or 0, that travels behind them."""

from __future__ import annotations

from itertools import groupby

import torch


class Flags:
    """Makes the flags of some gradients, once for each shard.

    They are repeated in memory: the fused kernels take no tensor that overlaps with itself.
    """

    def __init__(self, num_shards: int, device: torch.device) -> None:
        self._num_shards = num_shards
        self._device = device
        self._full: dict[torch.dtype, torch.Tensor] = {}

    def rows(self, dtype: torch.dtype, present: list[bool]) -> torch.Tensor:
        """Return [num_shards, num_flags], made on the device; those of a full set are kept."""
        is_full = all(present)
        flags = self._full.get(dtype) if is_full else None
        if flags is not None:
            return flags
        flags = torch.ones(self._num_shards, len(present), dtype=dtype, device=self._device)
        start = 0
        for is_present, run in groupby(present):
            stop = start + len(list(run))
            if not is_present:
                flags[:, start:stop].zero_()
            start = stop
        if is_full:
            self._full[dtype] = flags
        return flags
