"""Which gradients are reduced together, and where their shards come out: planned once, replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_shard import _torch
from composable_shard.core.comms import host_copies
from composable_shard.core.grads.grad_bucket import GradBucket
from composable_shard.core.params.offload import copies_beside_compute
from composable_shard.core.params.param import ShardedParam


class Route:
    """The way of some plain tensors, gradients or inner tensors of gradients, through one bucket.

    Attributes:
        bucket: Where they are packed.
        members: For each its parameter, and the name of the inner tensor (``None``: all of it).
        params: The parameters, if all members are whole gradients; else ``None``.
        is_carried: Whether their shards go to the host beside compute.
    """

    def __init__(
        self, bucket: GradBucket, members: Sequence[tuple[int, ShardedParam, str | None]], rank: int
    ) -> None:
        self.bucket = bucket
        self.members = [(param, inner) for _, param, inner in members]
        is_whole = all(inner is None for _, inner in self.members)
        self.params = [param for param, _ in self.members] if is_whole else None
        self._indices = [index for index, _, _ in members]
        self._is_plain = is_whole and all(param.form.is_plain for param, _ in self.members)
        flat = torch.empty(bucket.numel, device="meta")
        starts = bucket.layout.shard_offsets
        shards = [
            param.form.local(flat[start:], rank)
            for (param, _), start in zip(self.members, starts, strict=True)
        ]
        self._places = [(tuple(s.shape), s.stride(), int(s.storage_offset())) for s in shards]
        spans = [(place[2], s.numel()) for place, s in zip(self._places, shards, strict=True)]
        self._gaps = _gaps(spans, bucket.numel)
        self._specs: tuple[list[torch.dtype], list[_torch.DTensorSpec]] = ([], [])
        devices = {param.device for param, _ in self.members}
        self._device = devices.pop() if len(devices) == 1 else None
        self.is_carried = self._device is not None and all(
            copies_beside_compute(param.offload, param.mesh.device) for param, _ in self.members
        )

    def enter(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Pick the members' tensors, as they lie in memory, out of the gradients of all."""
        if self._is_plain:
            return [grads[index] for index in self._indices]
        return [
            None if (grad := grads[index]) is None else param.form.rows(_inner(grad, name))
            for index, (param, name) in zip(self._indices, self.members, strict=True)
        ]

    def shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View this rank's shard of each member in the flat result of the reduction."""
        return [flat.as_strided(*place) for place in self._places]

    def clear_gaps(self, flat: torch.Tensor) -> None:
        """Zero what of a result is part of no shard, for who looks at it as a whole."""
        for start, end in self._gaps:
            flat[start:end].zero_()

    def grad_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which users get the gradients."""
        with _torch.without_overrides():
            return [param.final_grad_dtype(self.bucket.dtype) for param, _ in self.members]

    def specs(self, dtypes: list[torch.dtype]) -> list[_torch.DTensorSpec]:
        """Return what describes the reduced gradients as DTensors of these dtypes."""
        if self._specs[0] != dtypes:
            pairs = zip(self.members, dtypes, strict=True)
            self._specs = dtypes, [p.spec_of_grad("sharded", dtype) for (p, _), dtype in pairs]
        return self._specs[1]

    def converted_shards(self, flat: torch.Tensor, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Return the shards on the devices of the parameters, each in its dtype.

        They are converted in one kernel if they all go the same way. They may be under way to the
        host; see :func:`~composable_shard.core.comms.host_copies.settle`.
        """
        if self._device is not None and dtypes.count(dtypes[0]) == len(dtypes):
            flat = flat.to(dtypes[0])
            if self.is_carried:
                flat = host_copies.download(flat)
            return self.shards(flat.to(self._device))
        return [
            shard.to(param.device, dtype)
            for shard, (param, _), dtype in zip(
                self.shards(flat), self.members, dtypes, strict=True
            )
        ]


def _inner(grad: torch.Tensor, name: str | None) -> torch.Tensor:
    inner: torch.Tensor = grad if name is None else getattr(grad, name)
    return inner


def _gaps(spans: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the ranges below ``end`` that lie in no span of a start and a number of elements."""
    taken = sorted((start, start + numel) for start, numel in spans)
    starts = [0, *(stop for _, stop in taken)]
    stops = [*(start for start, _ in taken), end]
    return [gap for gap in zip(starts, stops, strict=True) if gap[0] < gap[1]]
