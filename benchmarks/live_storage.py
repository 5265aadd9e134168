"""Counts the live bytes of tensor storage after every operation.

After each operation that is not a view, this adds up the sizes of all live storages seen so far. So
if a storage is freed or resized in place, the next operation shows it. Storages that share memory
count once. Memory that an operation allocates only internally is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from observe import Observer, tensors_in
from torch.multiprocessing.reductions import StorageWeakRef


class LiveStorage(Observer):
    """Tracks the storages of the inputs and outputs of all operations.

    Attributes:
        peak: The largest number of live bytes since the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def saw(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        for tensor in tensors_in(args, kwargs, result):
            if tensor.device.type != "meta":
                self._track(tensor.untyped_storage())
        self.peak = max(self.peak, self.live())

    def live(self) -> int:
        """Return the number of bytes of live storages."""
        ranges = []
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                start = storage.data_ptr()
                ranges.append((start, start + storage.nbytes()))
        return union_length(ranges)

    def reset_peak(self) -> None:
        self.peak = self.live()

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)


def union_length(ranges: Sequence[tuple[int, int]]) -> int:
    """Return the number of integers that lie in at least one range.

    >>> union_length([(0, 4), (2, 6), (8, 9), (8, 8)])
    7
    """
    total, end = 0, 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
