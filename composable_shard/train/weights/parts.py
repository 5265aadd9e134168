"""Which part of a full tensor a rank holds, in numbers: what it reads of a file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from composable_shard import _torch

Box = tuple[slice, ...]
"""A range of each dim."""


class Parts:
    """Answers which rows of which dims of a DTensor are this rank's, for many of them.

    A placement cuts one dim, so a shard is made of all combinations of some indices of each dim.
    Which ones DTensor itself says, of the numbers from 0 to the length of the dim: so it holds for
    shards that are uneven, or cut by several axes of a mesh in whatever order.
    """

    def __init__(self) -> None:
        self._runs: dict[object, list[tuple[int, int]]] = {}

    def boxes(self, tensor: torch.Tensor) -> Iterator[tuple[Box, Box]]:
        """Yield ranges of the full tensor, and where in this rank's part they are.

        One as a rule; several if a dim is cut so that this rank's rows are not neighbours; none
        if it holds nothing.

        Args:
            tensor: A DTensor, or a plain tensor of which each rank has all.
        """
        if not tensor.numel():
            return
        dims = [self._of_dim(tensor, dim) for dim in range(tensor.ndim)]
        for runs in product(*dims):
            yield tuple(slice(*full) for full, _ in runs), tuple(slice(*own) for _, own in runs)

    def _of_dim(
        self, tensor: torch.Tensor, dim: int
    ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return pairs of ranges along a dim: of the full tensor and of this rank's part."""
        length = tensor.shape[dim]
        if not isinstance(tensor, DTensor):
            return [((0, length), (0, length))]
        mesh = tensor.device_mesh
        placements = tuple(_along(placement, dim) for placement in tensor.placements)
        key = mesh, placements, length
        if key not in self._runs:
            self._runs[key] = _runs(mesh, placements, length)
        pairs, start = [], 0
        for first, end in self._runs[key]:
            pairs.append(((first, end), (start, start + end - first)))
            start += end - first
        return pairs


def _along(placement: Placement, dim: int) -> Placement:
    """Return the placement of the numbers of a dim."""
    if not _torch.shards_dim(placement, dim):
        return Replicate()
    return _torch.with_dim(placement, 0)


def _runs(
    mesh: DeviceMesh, placements: tuple[Placement, ...], length: int
) -> list[tuple[int, int]]:
    if all(placement.is_replicate() for placement in placements):
        return [(0, length)]
    numbers = torch.arange(length, device=mesh.device_type)
    own = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local().cpu()
    if not len(own):
        return []
    breaks = (torch.nonzero(own.diff() != 1).flatten() + 1).tolist()
    starts, ends = [0, *breaks], [*breaks, len(own)]
    return [
        (int(own[start]), int(own[end - 1]) + 1) for start, end in zip(starts, ends, strict=True)
    ]
