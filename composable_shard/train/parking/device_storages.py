"""Memory of a device that is freed for a while, its values in memory of the host.

A storage that owns its memory is emptied, and filled again later, so that all tensors in it, also
views that others hold, are what they were. Local shards have storages of their own in the memory of
their bucket; those get new ones. Where somebody else has a view of such a shard, which nobody could
give another memory, the whole buffer stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from composable_shard import _torch


class Span(NamedTuple):
    """A range of addresses, ``start`` to ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.end - self.start


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of ranges, sorted; those that touch become one.

    Example:
        >>> merged([Span(4, 8), Span(0, 4), Span(2, 3), Span(9, 9)])
        [Span(start=0, end=8)]
    """
    found: list[Span] = []
    for span in sorted(span for span in spans if span.nbytes > 0):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


class _Shown(list[torch.Tensor]):
    """The tensors that are known to lie in one storage."""

    @property
    def storage(self) -> torch.UntypedStorage:
        return self[0].untyped_storage()

    @property
    def span(self) -> Span:
        start = self.storage.data_ptr()
        return Span(start, start + self.storage.nbytes())

    @property
    def are_all(self) -> bool:
        """Whether nobody else has a tensor there."""
        alone = torch.zeros(1, device=self[0].device)
        return _torch.num_uses(self[0]) == _torch.num_uses(alone) + len(self) - 1


class DeviceStorages:
    """Storages of a device, to be emptied.

    Args:
        tensors: Plain tensors on devices.

    Attributes:
        spans: The ranges of addresses that can be freed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        known: dict[int, _Shown] = {}
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            known.setdefault(_torch.storage_number(tensor), _Shown()).append(tensor)
        filled = [shown for shown in known.values() if shown.span.nbytes]
        owners = [shown for shown in filled if shown.storage.resizable()]
        parts = [shown for shown in filled if not shown.storage.resizable()]
        self._owners: list[tuple[_Shown, list[_Shown]]] = []
        for owner in owners:
            inside = [part for part in parts if _lies_in(part, owner)]
            if all(part.are_all for part in inside):
                self._owners.append((owner, inside))
        self.spans = [owner.span for owner, _ in self._owners]
        self._left: list[_Freed] = []

    def copy(self) -> None:
        """Copy the values to memory of the host; nothing else changes."""
        self._left = [_Freed(owner, inside) for owner, inside in self._owners]
        for device in {owner[0].device for owner, _ in self._owners}:
            if _torch.has_streams(device):
                torch.accelerator.synchronize(device)

    def let_go(self) -> list[Span]:
        """Free the memory of the device; return what was freed."""
        for freed in self._left:
            freed.let_go()
        return self.spans

    def come_back(self) -> None:
        """Have the values on the device again.

        Raises:
            torch.OutOfMemoryError: If there is no room; what is missing can be had later.
        """
        while self._left:
            self._left[-1].come_back()
            self._left.pop()


def _lies_in(part: _Shown, owner: _Shown) -> bool:
    same = part[0].device == owner[0].device
    return same and owner.span.start <= part.span.start and part.span.end <= owner.span.end


class _Freed:
    """One storage, with its values on the host, and the tensors that lie in it."""

    def __init__(self, owner: _Shown, inside: list[_Shown]) -> None:
        device = owner[0].device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(owner.storage)
        is_pinned = _torch.has_streams(device)
        self._host = _torch.empty_like(self._bytes, device="cpu", pin_memory=is_pinned)
        self._host.copy_(self._bytes, non_blocking=is_pinned)
        self._parts = [
            (part, part.span.start - owner.span.start, part.storage.nbytes()) for part in inside
        ]
        self._places = [(t, t.storage_offset(), t.shape, t.stride()) for s in inside for t in s]

    def let_go(self) -> None:
        """Free the memory; local shards are of NaN meanwhile, without memory of their own."""
        for tensor, _, shape, _ in self._places:
            value = torch.nan if tensor.is_floating_point() else 0
            one = torch.full((1,), value, dtype=tensor.dtype, device=tensor.device)
            _set(tensor, one.untyped_storage(), 0, shape, (0,) * len(shape))
        _torch.free(self._bytes)

    def come_back(self) -> None:
        """Have the memory, and the values in it."""
        _torch.allocate(self._bytes)
        self._bytes.copy_(self._host)
        where = {id(t): (offset, shape, stride) for t, offset, shape, stride in self._places}
        for tensors, start, nbytes in self._parts:
            storage = self._bytes.untyped_storage()[start : start + nbytes]
            for tensor in tensors:
                offset, shape, stride = where[id(tensor)]
                _set(tensor, storage, int(offset), shape, stride)


def _set(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> None:
    """Give a tensor other memory; its version stays."""
    with torch.inference_mode(False), torch.no_grad(), _torch.preserved_versions([tensor]):
        tensor.set_(storage, offset, shape, stride)
