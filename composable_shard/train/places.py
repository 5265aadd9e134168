"""The current and the new ranks of a model's tensors, and the part of each rank.

A tensor of 6 rows from 3 ranks to 2; rank 0 keeps its rows and gets row 2, rank 1 gets the rest::

    before   rank 0 | r0 r1 |   rank 1 | r2 r3 |   rank 2 | r4 r5 |
    after    rank 0 | r0 r1 r2 |           rank 1 | r3 r4 r5 |

A rank that shares a copy with other ranks receives the rest from that copy; a rank that holds
nothing is assigned a copy. So every rank gets each element once. The parts to send are cut into
pieces, and the pieces into rounds in which no rank has more than a bucket.

Each rank sends its own location to the others, in numbers: a rank outside of a mesh, or in another
part of it, has neither its process groups nor its order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from composable_shard.core.group import ParamGroup
from composable_shard.core.placement import ParamPlacement, Role, plan_placement
from composable_shard.core.storage import ShardedParam, sharded_form
from composable_shard.errors import ShardError
from composable_shard.mesh import DataParallelMeshDims, ShardMesh, resolve_mesh
from composable_shard.optim.blocks import Box, spread_over
from composable_shard.optim.layouts import Fits, does_fit

# PURE: which part of a tensor goes from which rank to which ---------------------------------------

COPIES_SENT = 2
"""The copies of a message on the sending rank: each part alone, and all parts together."""


Holding = dict[int, tuple[Box, int]]
"""The layout of a tensor: the box of each rank, and the copy of the tensor that it belongs to."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that moves from one rank to another, or stays.

    Attributes:
        tensor: The index of the tensor.
        source: The rank that has it.
        target: The rank that needs it.
        box: Its range in the tensor.
    """

    tensor: int
    source: int
    target: int
    box: Box


def pieces_of(tensor: int, before: Holding, after: Holding) -> list[Piece]:
    """Return the pieces that move a tensor to a new layout; each rank gets every element once.

    Args:
        tensor: Its index.
        before: Its current layout.
        after: Its new layout.
    """
    copies: dict[int, list[int]] = defaultdict(list)
    for rank, (_, copy) in before.items():
        copies[copy].append(rank)
    names = sorted(copies)
    found = []
    for place, (target, (wanted, _)) in enumerate(after.items()):
        copy = before[target][1] if target in before else names[place % len(names)]
        for source in copies[copy]:
            box = before[source][0].overlap(wanted)
            if box.numel:
                found.append(Piece(tensor, source, target, box))
    return found


def cut_box(box: Box, most: int) -> Iterator[Box]:
    """Yield parts of a box with at most ``most`` elements each, which together form the box.

    Example:
        >>> [part.sizes for part in cut_box(Box((0, 0), (5, 4)), 8)]
        [(2, 4), (2, 4), (1, 4)]
    """
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, most * box.sizes[dim] // box.numel)
    for start in range(0, box.sizes[dim], rows):
        starts, sizes = list(box.starts), list(box.sizes)
        starts[dim], sizes[dim] = starts[dim] + start, min(rows, sizes[dim] - start)
        yield from cut_box(Box(tuple(starts), tuple(sizes)), most)


def rounds_of(
    pieces: Iterable[Piece], itemsizes: Sequence[int], bucket_nbytes: int
) -> list[list[Piece]]:
    """Put pieces into rounds in which no rank has more than a bucket of messages.

    Args:
        pieces: All pieces that move from one rank to another.
        itemsizes: Bytes of an element, by tensor.
        bucket_nbytes: Bytes of messages, sent and received, that a rank has at a time; at least one
            element.
    """
    rounds: list[list[Piece]] = [[]]
    loads = Counter[int]()  # bytes of the last round, by rank
    for piece in pieces:
        itemsize = itemsizes[piece.tensor]
        most = max(1, bucket_nbytes // (COPIES_SENT * itemsize))
        for box in cut_box(piece.box, most):
            nbytes = box.numel * itemsize
            costs = {piece.source: COPIES_SENT * nbytes, piece.target: nbytes}
            if any(loads[rank] + cost > bucket_nbytes for rank, cost in costs.items()):
                rounds.append([])
                loads.clear()
            rounds[-1].append(replace(piece, box=box))
            loads.update(costs)
    return [some for some in rounds if some]


# The part of a tensor on each rank ----------------------------------------------------------------


class Ground(NamedTuple):
    """The ranks of a tensor, and the roles of the axes of their mesh.

    Attributes:
        ranks: Their global ranks; the last axis varies fastest.
        extents: The number of ranks along each axis.
        roles: The role of each axis: shard or replicate.
    """

    ranks: tuple[int, ...]
    extents: tuple[int, ...]
    roles: tuple[Role, ...]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, mesh: DeviceMesh, roles: tuple[Role, ...]) -> Ground:
        """Return the ranks of a mesh; the same object each time, so that it is pickled once.

        Raises:
            ShardError: If the ranks do not ascend: process groups sort their ranks, so the real
                layout would differ from the mesh.
        """
        ranks = mesh.mesh
        if not all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.ndim)):
            raise ShardError(
                "Expected a mesh with ranks that ascend along each axis for a model to move, got "
                f"{ranks.tolist()}; such a model is moved by a checkpoint"
            )
        return cls(tuple(ranks.flatten().tolist()), tuple(mesh.shape), roles)

    def holding(self, shape: Sequence[int], dim: int | None) -> Holding:
        """Return the layout of a tensor that is sharded on a dim, or on none."""
        over = tuple(dim if role == "shard" else None for role in self.roles)
        spread = spread_over(tuple(shape), self.extents, over)
        return dict(zip(self.ranks, zip(spread.boxes, spread.replicas, strict=True), strict=True))


def placements_of(roles: Sequence[Role], dim: int | None) -> tuple[Placement, ...]:
    """Return the placements of a DTensor on axes of these roles, sharded on a dim or on none."""
    cut: Placement = Replicate() if dim is None else Shard(dim)
    return tuple(cut if role == "shard" else Replicate() for role in roles)


# The new meshes of parameters ---------------------------------------------------------------------

Meshes = DeviceMesh | Mapping[Fits, DeviceMesh]
"""The mesh of all parameters; or a mesh for each pattern of names: the first that fits decides."""


class Target:
    """The meshes to which parameters move, and their placements there.

    Args:
        model: The model.
        params: Its sharded parameters.
        meshes: The new meshes.

    Attributes:
        is_member: Whether this rank will have the model. If not, the two lists are empty.
        over: The data-parallel ranks of each parameter.
        placements: The new placements of each parameter.

    Raises:
        ValueError: If a parameter has no mesh, or does not fit its mesh.
        ShardError: If this rank is in the meshes of some parameters only.
    """

    def __init__(self, model: nn.Module, params: Sequence[ShardedParam], meshes: Meshes) -> None:
        self._params, self._meshes = params, _mesh_of_each(model, params, meshes)
        members = {mesh.get_coordinate() is not None for mesh in self._meshes}
        if len(members) > 1:
            raise ShardError(
                "Expected this rank in the meshes of all parameters, or of none, got it in "
                "those of some"
            )
        self.is_member = True in members
        self.over: dict[ShardedParam, ShardMesh] = {}
        self.placements: list[ParamPlacement] = []
        for param, mesh in zip(params, self._meshes, strict=True) if self.is_member else ():
            over = self.over[param] = resolve_mesh(mesh, _dims_of(param))
            planned = plan_placement(param.name, whole_on_meta(param), param.layout.dim, over)
            self.placements.append(planned)

    def grounds(self) -> list[Ground]:
        """Return the new location of each parameter; nothing on a rank that leaves."""
        return [Ground.of(planned.mesh, planned.roles) for planned in self.placements]

    def of_group(self, group: ParamGroup) -> ShardMesh:
        """Return the new mesh of a group: that of parameters on its old mesh, if there are any."""
        of_mesh = [param for param in group.params if param.mesh == group.mesh]
        return next(self.over[param] for param in (*of_mesh, *group.params, *self.over))

    def elsewhere(self, index: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh of a parameter, without this rank, and approximate placements.

        Torch does not slice a mesh on a rank that is not in it, so this may have more axes.
        """
        mesh, placement = self._meshes[index], self._params[index].placement
        if mesh.ndim == placement.mesh.ndim:
            return mesh, placement.sharded
        cut = placement.sharded[placement.roles.index("shard")]
        return mesh, (*[Replicate()] * (mesh.ndim - 1), cut)


def _dims_of(param: ShardedParam) -> DataParallelMeshDims | None:
    """Return the data-parallel axes of the mesh, if the parameter is on all of them."""
    dims = param.mesh.dims
    if dims is not None and max(len(dims.shard_names), len(dims.replicate_names)) > 1:
        raise ShardError(
            f"Expected dp_mesh_dims of one axis for each purpose of parameter '{param.name}', got "
            f"{dims}; such a model is moved by a checkpoint"
        )
    return dims


def _mesh_of_each(
    model: nn.Module, params: Sequence[ShardedParam], meshes: Meshes
) -> list[DeviceMesh]:
    if isinstance(meshes, DeviceMesh):
        return [meshes] * len(params)
    names: dict[torch.Tensor, list[str]] = {}
    for name, registered in model.named_parameters(remove_duplicate=False):
        names.setdefault(sharded_form(registered), []).append(name)
    found = []
    for param in params:
        aliases = names.get(param.sharded, [param.name])
        fitting = [mesh for fits, mesh in meshes.items() if does_fit(fits, aliases, param.sharded)]
        if not fitting:
            raise ValueError(
                f"Expected a mesh for parameter '{aliases[0]}', got none that fits; add one for '*'"
            )
        found.append(fitting[0])
    return found


def whole_on_meta(param: ShardedParam) -> torch.Tensor:
    """Return a meta tensor like the full parameter."""
    return param.layout.whole(torch.empty(param.layout.param.numel, device="meta"))
