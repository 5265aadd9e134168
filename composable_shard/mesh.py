"""The ranks that shard and replicate parameters, and their devices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from composable_shard import _torch
from composable_shard.arguments import call_for_parameter, check_type, check_value


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Name the data-parallel axes of a mesh that may have other axes too.

    Use it for parameters that are DTensors on a mesh with axes for data parallelism and for tensor
    parallelism. Plain parameters are allowed if all axes are data-parallel. If you pass several
    names as ``shard`` or as ``replicate``, these axes act as one flattened axis.

    Args:
        shard: The axis, or axes, over which parameters are sharded.
        replicate: The axis, or axes, over which the shards are replicated.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If both are absent, or an axis is named twice.

    Source: ``torch.distributed.fsdp.DataParallelMeshDims``.

    Example:
        >>> DataParallelMeshDims(shard=("dp_shard", "cp")).shard_names
        ('dp_shard', 'cp')
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field, value in (("shard", self.shard), ("replicate", self.replicate)):
            fits = value is None or isinstance(value, (str, tuple, list))
            check_type(field, value, fits, "the name of a mesh axis, a tuple of names or None")
        names = [*self.shard_names, *self.replicate_names]
        if not names:
            raise ValueError("Expected shard or replicate to name a mesh axis, got neither")
        for name in names:
            check_type("the name of a mesh axis", name, isinstance(name, str), "a str")
        is_once = len(set(names)) == len(names)
        check_value("each mesh axis", tuple(names), is_once, "to be named once")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return the axes that shard."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return the axes that replicate."""
        return _as_names(self.replicate)


@dataclass(frozen=True)
class ShardPlacementResult:
    """The placement and the mesh of one parameter, as a ``shard_placement_fn`` may return them.

    Args:
        placement: ``Shard(dim)``, or ``None`` for ``Shard(0)``.
        mesh: A 1-D mesh, or a 2-D mesh ``(replicate, shard)``. ``None`` means the mesh of the
            ``fully_shard`` call.

    ``fully_shard`` checks both values, so its errors name the parameter.

    Source: ``torch.distributed.fsdp.ShardPlacementResult``, which takes a private mesh object.

    Example:
        >>> ShardPlacementResult(Shard(1))
        ShardPlacementResult(placement=Shard(dim=1), mesh=None)
    """

    placement: Shard | None = None
    mesh: DeviceMesh | None = None


ShardPlacementFn = Callable[[nn.Parameter], Shard | DeviceMesh | ShardPlacementResult | None]


@dataclass(frozen=True)
class ShardMesh:
    """The data-parallel ranks of a parameter: shards and replicas.

    Attributes:
        mesh: The DeviceMesh of the data-parallel axes, replicas first.
        shard_group: Process group of the ranks that share a parameter; ``None`` if no axis shards.
        num_shards: Number of ranks in ``shard_group``.
        shard_rank: This rank's index in ``shard_group``.
        replica_group: Process group of the ranks with the same shards; ``None`` if no axis
            replicates.
        num_replicas: Number of ranks in ``replica_group``.
        device: The compute device of this rank.
        dims: The names of the data-parallel axes, if the user passed them.
        full_mesh: The whole mesh that the user passed with ``dims``.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup | None
    num_shards: int
    shard_rank: int
    replica_group: dist.ProcessGroup | None
    num_replicas: int
    device: torch.device
    dims: DataParallelMeshDims | None = None
    full_mesh: DeviceMesh | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks over which a gradient is averaged."""
        return self.num_shards * self.num_replicas

    @cached_property
    def shard_axis(self) -> DeviceMesh:
        """The 1-D mesh of the shards of a parameter, or of its replicas if no axis shards."""
        return _torch.last_axis(self.mesh)

    @property
    def channel_meshes(self) -> tuple[ShardMesh, ...]:
        """The meshes that each have a `Channel`: only this mesh."""
        return (self,)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of more than one rank: of the shards, then of the replicas."""
        groups = (self.shard_group, self.replica_group)
        return [group for group in groups if group is not None and group.size() > 1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without process groups; loading finds them by the ranks of the mesh."""
        shard_axis = None if self.shard_group is None else self.mesh.ndim - 1
        replicate_axis = None if self.replica_group is None else 0
        axes = shard_axis, replicate_axis
        return _restored_mesh, (type(self), self.mesh, *axes, self.dims, self.full_mesh)

    @property
    def is_whole(self) -> bool:
        """Whether all axes of the mesh that the user passed are data-parallel."""
        if self.dims is None or self.full_mesh is None:
            return True
        names = {*self.dims.shard_names, *self.dims.replicate_names}
        return names == set(self.full_mesh.mesh_dim_names or ())


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> ShardMesh:
    """Derive the data-parallel ranks from a mesh.

    Args:
        mesh: A 1-D mesh, or a 2-D mesh ``(replicate, shard)`` with named axes. ``None`` means all
            ranks on the current accelerator, or on the CPU if there is none. ``None`` also starts
            the default process group from the environment, unless there is one.
        dims: The data-parallel axes of ``mesh``, which may then have any number of axes.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``mesh`` has the wrong number of axes, has no names, lacks a name in
            ``dims``, has names that contradict their use, is for devices that this process does not
            have, or does not include this rank.
    """
    if mesh is None:
        start_process_group()
        mesh = init_device_mesh(default_device_type(), (dist.get_world_size(),))
    check_type("mesh", mesh, isinstance(mesh, DeviceMesh), "a DeviceMesh")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Expected a mesh that rank {dist.get_rank()} is in, got {mesh}; shard on its ranks"
        )
    if dims is not None:
        return _from_names(mesh, dims)
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise ValueError(
            f"Expected a mesh of 1 axis, or of 2 named axes (replicate, then shard), got {mesh}; "
            "pass mesh_dim_names, or the data-parallel axes, such as mesh['shard'], or dp_mesh_dims"
        )
    _check_axis_names(mesh)
    return shard_mesh_of(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None)


def _check_axis_names(mesh: DeviceMesh) -> None:
    """Raise if names contradict the order (replicate, shard), such as ("shard", "replicate")."""
    names = [name.lower() for name in mesh.mesh_dim_names or ("",)]
    shards, replicates = ([word in name for name in names] for word in ("shard", "replic"))
    if replicates[-1] > shards[-1] or shards[0] > shards[-1]:
        raise ValueError(
            "Expected a mesh with axes (replicate, shard), or one axis to shard, got axes named "
            f"{mesh.mesh_dim_names}; pass the axes in this order, or name their purposes by "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
        )


def _from_names(mesh: DeviceMesh, dims: DataParallelMeshDims) -> ShardMesh:
    is_kind = isinstance(dims, DataParallelMeshDims)
    check_type("dp_mesh_dims", dims, is_kind, "a DataParallelMeshDims")
    known = mesh.mesh_dim_names or ()
    for name in (*dims.shard_names, *dims.replicate_names):
        check_value("dp_mesh_dims", name, name in known, f"to name axes out of {known}")
    kinds = [names for names in (dims.replicate_names, dims.shard_names) if names]
    axes = _torch.concatenate_meshes([_torch.flat_axis(mesh, names) for names in kinds])
    shard_axis = axes.ndim - 1 if dims.shard_names else None
    return shard_mesh_of(axes, shard_axis, 0 if dims.replicate_names else None, dims, mesh)


def shard_mesh_of(
    mesh: DeviceMesh,
    shard_axis: int | None,
    replicate_axis: int | None = None,
    dims: DataParallelMeshDims | None = None,
    full_mesh: DeviceMesh | None = None,
) -> ShardMesh:
    """Return the ShardMesh that shards over one axis of a mesh and replicates over another.

    Raises:
        ValueError: If this process cannot use the devices of the mesh.
    """
    shards = None if shard_axis is None else mesh.get_group(shard_axis)
    replicas = None if replicate_axis is None else mesh.get_group(replicate_axis)
    shard_rank = 0 if shards is None else shards.rank()
    num_shards, num_replicas = (1 if g is None else g.size() for g in (shards, replicas))
    own, others = (shards, num_shards, shard_rank), (replicas, num_replicas)
    return ShardMesh(mesh, *own, *others, _device_of(mesh), dims, full_mesh)


def _restored_mesh(kind: type[ShardMesh], mesh: DeviceMesh, *others: Any) -> ShardMesh:
    for unpickled in filter(None, (mesh, others[-1])):  # the last one is the full mesh
        _torch.rebind(unpickled)
    return kind(**vars(shard_mesh_of(mesh, *others)))


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


# Variables that launchers set. If one is set, this process may not be the only rank.
_LAUNCHED = {"RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}

_started: list[tuple[dist.ProcessGroup, int]] = []  # a process group, and the id of its process


def start_process_group() -> None:
    """Start the default process group from the environment, unless there is one.

    Without a launcher, as in a notebook, this process is the only rank. At the end of the process,
    the library destroys the group: see ``end_process_groups``.
    """
    if not dist.is_initialized():
        alone: dict[str, Any] = {}
        if _LAUNCHED.isdisjoint(os.environ):
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            warnings.warn(
                "Expected a launcher such as torchrun, got a process without RANK and WORLD_SIZE, "
                "which trains on one rank; for more, start it with torchrun --nproc-per-node N",
                stacklevel=2,
            )
        with _torch.gloo_of_one_worker():
            dist.init_process_group(**alone)
        assert dist.group.WORLD is not None
        _started[:] = [(dist.group.WORLD, os.getpid())]


def started_process_group() -> dist.ProcessGroup | None:
    """Return the default process group, if :func:`start_process_group` has started it.

    A forked process has none, because the threads of the group run in its parent.
    """
    return next((group for group, process in _started if process == os.getpid()), None)


def largest_of(meshes: Iterable[ShardMesh]) -> ShardMesh:
    """Return the mesh with the most ranks, the first one in a tie."""
    return max(meshes, key=lambda mesh: mesh.num_ranks)


def places_of(mesh: DeviceMesh) -> dict[int, int]:
    """Return the place of each rank in a mesh, counted row by row, with sorted ranks on each axis.

    The process group of an axis sorts its ranks, and shards follow that order.
    """
    places = torch.zeros_like(mesh.mesh)
    for axis in range(mesh.ndim):
        places = places * mesh.size(axis) + mesh.mesh.argsort(axis).argsort(axis)
    return dict(zip(mesh.mesh.flatten().tolist(), places.flatten().tolist(), strict=True))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    if mesh.device_type != default_device_type():
        raise ValueError(
            f"Expected a mesh of available devices, got {mesh.device_type}; make it for the device "
            "type of the machine, such as init_device_mesh('cpu', ...)"
        )
    return current_device()


def default_device_type() -> str:
    """Return the type of the available accelerators; "cpu" if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def current_device() -> torch.device:
    """Return the current accelerator; the CPU if there is none."""
    kind = default_device_type()
    index = None if kind == "cpu" else torch.accelerator.current_device_index()
    return torch.device(kind) if index is None else torch.device(kind, index)


def placement_of(
    name: str, param: nn.Parameter, shard_placement_fn: ShardPlacementFn | None
) -> tuple[Shard | None, DeviceMesh | None]:
    """Call ``shard_placement_fn`` for a parameter; return the placement and mesh that it chose."""
    result = call_for_parameter("shard_placement_fn", shard_placement_fn, name, param)
    placement, mesh = (None, result) if isinstance(result, DeviceMesh) else (result, None)
    if isinstance(result, ShardPlacementResult):
        placement, mesh = result.placement, result.mesh
    if isinstance(placement, Shard | None) and isinstance(mesh, DeviceMesh | None):
        return placement, mesh
    raise ValueError(
        "Expected shard_placement_fn to return Shard, a DeviceMesh, ShardPlacementResult or None "
        f"for parameter '{name}', got {type(result).__name__}: {result!r}"
    )


def own_mesh_of(name: str, mesh: DeviceMesh) -> ShardMesh:
    """Resolve the mesh that the user chose for one parameter; errors name the parameter."""
    try:
        return resolve_mesh(mesh)
    except ValueError as error:
        raise ValueError(f"{error}, from shard_placement_fn for parameter '{name}'") from error


def shard_dim(name: str, param: nn.Parameter, placement: Shard | None) -> int | None:
    """Return the dim to shard; ``None`` for a scalar."""
    if placement is None:
        return 0 if param.ndim else None
    fits, what = -param.ndim <= placement.dim < param.ndim, f"within the {param.ndim} dims of"
    check_value("shard_placement_fn", placement, fits, f"to return a dim {what} parameter '{name}'")
    return placement.dim % param.ndim


def check_reshard(choice: bool | int | None, meshes: Iterable[ShardMesh]) -> bool | int | None:
    """Check a ``reshard_after_forward``; return it, or a bool in place of an equivalent int.

    Raises:
        ValueError: If it is neither a bool, ``None`` nor an int that divides the number of shards.
    """
    if choice is None or isinstance(choice, bool):
        return choice
    is_int, what = isinstance(choice, int), "to be True, False, a number of ranks or None"
    check_value("reshard_after_forward", choice, is_int, what)
    sizes = sorted({mesh.num_shards for mesh in meshes})
    for num_shards in sizes:
        if choice < 1 or num_shards % choice:
            raise ValueError(
                "Expected reshard_after_forward to divide the number of shards, got "
                f"{choice} for {num_shards} shards"
            )
    if choice == 1:
        text = "reshard_after_forward=1 keeps all parameters after forward; pass False instead"
        warnings.warn(text, stacklevel=3)
        return False
    return True if sizes == [choice] else choice
