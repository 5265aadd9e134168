"""Where the parameters of a model are to lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from composable_shard.core.group import ParamGroup
from composable_shard.core.placement import ParamPlacement
from composable_shard.core.storage import ShardedParam, sharded_form
from composable_shard.errors import ShardError
from composable_shard.mesh import DataParallelMeshDims, ShardMesh, resolve_mesh
from composable_shard.optim.layouts import Fits, does_fit
from composable_shard.train.moving.ground import Ground
from composable_shard.train.moving.relocation import plan

Meshes = DeviceMesh | Mapping[Fits, DeviceMesh]
"""The mesh of all parameters; or one for each pattern of names, the first of which fits."""


class Target:
    """The meshes to which parameters move, and how they will lie there.

    Args:
        model: The model.
        params: Its sharded parameters.
        meshes: Where to.

    Attributes:
        is_member: Whether this rank is to have the model. If not, the two lists are empty.
        over: The data-parallel ranks of each parameter.
        placements: How each parameter will lie.

    Raises:
        ValueError: If a parameter has no mesh, or does not fit its own.
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
        self.over: list[ShardMesh] = []
        self.placements: list[ParamPlacement] = []
        for param, mesh in zip(params, self._meshes, strict=True) if self.is_member else ():
            over = resolve_mesh(mesh, _dims_of(param))
            self.over.append(over)
            self.placements.append(plan(param, over))
        self._indices = {id(param): index for index, param in enumerate(params)}

    def grounds(self) -> list[Ground]:
        """Return where each parameter will lie; nothing on a rank that leaves."""
        return [Ground.of(planned.mesh, planned.roles) for planned in self.placements]

    def mesh_for(self, param: ShardedParam) -> ShardMesh:
        """Return the data-parallel ranks of a parameter."""
        return self.over[self._indices[id(param)]]

    def peers(self) -> set[int]:
        """Return the ranks with which this one will share all parameters."""
        ranks = [{*over.mesh.mesh.flatten().tolist()} for over in self.over]
        return set.intersection(*ranks) if ranks else set()

    def of_group(self, group: ParamGroup) -> ShardMesh:
        """Return the mesh of a group: of those of its parameters that had its own, or of any."""
        own = [param for param in group.params if param.mesh == group.mesh]
        found = [self.over[self._indices[id(param)]] for param in (own or group.params)]
        return (found or self.over)[0]

    def elsewhere(self, index: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return on which mesh, without this rank, a parameter lies, and how.

        Torch does not slice a mesh on a rank that is not in it, so this may have more axes.
        """
        mesh, placement = self._meshes[index], self._params[index].placement
        if self._params[index].mesh.dims is not None and mesh.ndim == placement.mesh.ndim:
            return mesh, placement.sharded
        found: list[Placement] = [Replicate()] * mesh.ndim
        names, model = mesh.mesh_dim_names or (), placement.model
        if model is not None:
            for name, cut in zip(model.mesh.mesh_dim_names or (), model.placements, strict=True):
                if name in names:
                    found[names.index(name)] = cut
        data = [axis for axis, cut in enumerate(found) if cut.is_replicate()]
        if data:
            found[data[-1]] = placement.sharded[placement.roles.index("shard")]
        return mesh, tuple(found)


def _dims_of(param: ShardedParam) -> DataParallelMeshDims | None:
    """Return which axes of the mesh are data-parallel, if the parameter is on all of them."""
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
        own = names.get(param.sharded, [param.name])
        fitting = [mesh for fits, mesh in meshes.items() if does_fit(fits, own, param.sharded)]
        if not fitting:
            raise ValueError(
                f"Expected a mesh for parameter '{own[0]}', got none that fits; add one for '*'"
            )
        found.append(fitting[0])
    return found
