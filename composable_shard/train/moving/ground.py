"""On which ranks a tensor lies, and which part of it each of them has.

What is said here of other ranks they say themselves, in numbers: a rank that is not in a mesh, or
in another part of it, knows neither its process groups nor its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from composable_shard import _torch
from composable_shard.core.placement import ParamPlacement, Role
from composable_shard.errors import ShardError
from composable_shard.mesh import places_of
from composable_shard.optim.blocks import spread_over
from composable_shard.train.moving.plan import Holding


class Cut(NamedTuple):
    """Which dims of a tensor are cut, whatever the number of ranks.

    Attributes:
        shard: The dim that the data-parallel ranks shard; ``None`` if they have all of it.
        num_parts: Of how many parts of that dim, which other axes have cut, each is sharded;
            ``None`` if data-parallel ranks come first.
        model: For each axis that splits the model, the dim that it cuts, if any.
    """

    shard: int | None = None
    num_parts: int | None = None
    model: tuple[int | None, ...] = ()

    def placements(self, roles: Sequence[Role]) -> tuple[Placement, ...]:
        """Return how a DTensor that is cut so lies on a mesh with axes of these roles."""
        model = iter(self.model)
        dims = {"replicate": None, "shard": self.shard}
        found = list[Placement]()
        for role in roles:
            dim = next(model) if role is None else dims[role]
            if dim is None:
                found.append(Replicate())
            elif role == "shard" and self.num_parts is not None:
                found.append(_torch.strided_shard(dim, self.num_parts))
            else:
                found.append(Shard(dim))
        return tuple(found)


class Ground(NamedTuple):
    """The ranks that a tensor lies on, and what they have of it by the axes of their mesh.

    Attributes:
        ranks: Their numbers in the job, in the order of shards, along the last axis first.
        extents: How many there are along each axis.
        roles: What each axis does: shard, replicate, or, ``None``, split the model.
    """

    ranks: tuple[int, ...]
    extents: tuple[int, ...]
    roles: tuple[Role, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, roles: Sequence[Role]) -> Ground:
        """Return the ranks of a mesh.

        Raises:
            ShardError: If ranks have no place of their own where process groups, which sort their
                ranks, say what lies where; or, if an axis splits the model, another than there.
        """
        places, known = places_of(mesh), mesh.mesh.tolist()
        if len({*places.values()}) < len(places):
            raise ShardError(
                "Expected a mesh whose ranks, sorted along each axis as process groups sort them, "
                f"have a place of their own, got {known}"
            )
        ranks = sorted(places, key=lambda rank: places[rank])
        if None in roles and ranks != mesh.mesh.flatten().tolist():
            raise ShardError(
                "Expected a mesh that splits the model to have ranks that ascend along each axis, "
                f"got {known}"
            )
        return cls(tuple(ranks), tuple(mesh.shape), tuple(roles))

    def holding(self, shape: Sequence[int], cut: Cut) -> Holding:
        """Return how a tensor lies there."""
        model = iter(cut.model)
        dims = {"replicate": None, "shard": cut.shard}
        over = [next(model) if role is None else dims[role] for role in self.roles]
        is_inner = cut.num_parts is not None
        inner = [axis for axis, role in enumerate(self.roles) if role == "shard" and is_inner]
        return Holding(self.ranks, spread_over(shape, self.extents, over, inner))


def cut_of(what: str, tensor: DTensor, placement: ParamPlacement) -> Cut:
    """Return how a parameter is cut, or its gradient, or a state of it.

    Args:
        what: What messages call it.
        tensor: The tensor.
        placement: Of the parameter.

    Raises:
        ShardError: If it is not cut into ranges, or lies on another mesh than the parameter.
    """
    mesh, dims = tensor.device_mesh, [getattr(p, "dim", None) for p in tensor.placements]
    axis = placement.roles.index("shard") if "shard" in placement.roles else None
    model = tuple(d for d, role in zip(dims, placement.roles, strict=False) if role is None)
    cut = Cut(model=model)
    expected = None
    if mesh == placement.mesh and axis is not None:
        later = range(axis + 1, mesh.ndim)
        expected = prod(mesh.size(other) for other in later if dims[other] == dims[axis])
        cut = Cut(dims[axis], _torch.num_parts_of_strided(tensor.placements[axis]), model)
    is_whole = cut.num_parts in (None, expected)
    if (
        mesh != placement.mesh
        or not is_whole
        or cut.placements(placement.roles) != tensor.placements
    ):
        raise ShardError(
            f"Expected {what} to be cut by Shard over axes of the mesh of the parameter, got "
            f"{tensor.placements} on {mesh}; such a model is moved by a checkpoint"
        )
    return cut
