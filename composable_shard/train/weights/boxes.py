"""Which part of a full tensor a rank holds, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from composable_shard import _torch

Box = tuple[slice, ...]
"""A range of each dim."""

Run = tuple[int, int]
"""The first number of a range, and the one after its last."""


class Parts:
    """Answers which rows of which dims of a DTensor are a rank's, for many of them.

    A placement cuts one dim, so a shard is made of all combinations of some indices of each dim.
    Which ones the placements say themselves, of the numbers from 0 to the length of the dim: so it
    holds for shards that are uneven, or cut by several axes of a mesh in whatever order.
    """

    def __init__(self) -> None:
        self._runs: dict[object, list[Run]] = {}

    def boxes(
        self, tensor: torch.Tensor, coordinate: Sequence[int] | None = None
    ) -> Iterator[tuple[Box, Box]]:
        """Yield ranges of the full tensor, and where in a rank's part they are.

        One as a rule; several if a dim is cut so that the rank's rows are not neighbours; none
        if it holds nothing.

        Args:
            tensor: A DTensor, or a plain tensor of which each rank has all.
            coordinate: Which rank of its mesh; this one if absent.
        """
        if not tensor.numel():
            return
        dims = [_paired(runs) for runs in self._of_dims(tensor, coordinate)]
        for pairs in product(*dims):
            yield tuple(slice(*full) for full, _ in pairs), tuple(slice(*own) for _, own in pairs)

    def shape(self, tensor: DTensor, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a rank holds."""
        dims = self._of_dims(tensor, coordinate)
        return tuple(sum(end - first for first, end in runs) for runs in dims)

    def _of_dims(
        self, tensor: torch.Tensor, coordinate: Sequence[int] | None
    ) -> Iterator[list[Run]]:
        if not isinstance(tensor, DTensor):
            yield from ([(0, length)] for length in tensor.shape)
            return
        mesh = tensor.device_mesh
        place = mesh.get_coordinate() if coordinate is None else coordinate
        assert place is not None
        for dim, length in enumerate(tensor.shape):
            cuts = tuple(
                (placement, mesh.size(axis), place[axis])
                for axis, placement in enumerate(tensor.placements)
                if _torch.shards_dim(placement, dim)
            )
            key = cuts, length
            if key not in self._runs:
                self._runs[key] = _runs(cuts, length)
            yield self._runs[key]


def sharded_axes(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the axes of a mesh over whose ranks a tensor is spread."""
    spread = (i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1)
    return tuple(spread)


def _paired(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair ranges of a dim with where they are in what a rank holds."""
    pairs, start = [], 0
    for first, end in runs:
        pairs.append(((first, end), (start, start + end - first)))
        start += end - first
    return pairs


def _runs(cuts: Sequence[tuple[Placement, int, int]], length: int) -> list[Run]:
    """Return the ranges of a dim that one axis after another leaves to a rank."""
    if not cuts:
        return [(0, length)]
    own = torch.arange(length, device="cpu")
    for placement, num_parts, place in cuts:
        own = _torch.split(own, _torch.with_dim(placement, 0), num_parts)[place]
    if not len(own):
        return []
    breaks = (torch.nonzero(own.diff() != 1).flatten() + 1).tolist()
    starts, ends = [0, *breaks], [*breaks, len(own)]
    return [
        (int(own[start]), int(own[end - 1]) + 1) for start, end in zip(starts, ends, strict=True)
    ]
