"""The sharding of one parameter: its layout in flat buffers, and the placements of its DTensor.

A flat buffer holds the elements of a tensor in memory order. So a transposed or channels-last
parameter is sharded, gathered and reduced without a permuting copy, and keeps its strides. A scalar
cannot be cut. In flat buffers, it is a vector of equal elements, one for each rank, so each rank
holds the whole scalar.

A tensor-parallel parameter is sharded once more, within the local tensor of each rank. Its DTensor
then spans the data-parallel axes and the tensor-parallel axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from composable_shard import _torch
from composable_shard.core.layout import PACKED_ALIGNMENT_NBYTES, ParamLayout
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh

# A tensor of any shape and stride in flat buffers -------------------------------------------------


@dataclass(frozen=True)
class TensorLayout:
    """The sharding of one tensor along one dim.

    Attributes:
        shape: The shape of the user's tensor.
        dim: Its sharded dim; ``None`` for a scalar, which every rank holds.
        order: Its dims by descending stride; ``None`` if flat buffers keep the user's order: for a
            scalar, a contiguous tensor, or a tensor that is not dense.
        flat: The layout of its rows in flat buffers, with dims in memory order.
    """

    shape: tuple[int, ...]
    dim: int | None
    order: tuple[int, ...] | None
    flat: ParamLayout

    @property
    def is_cut_in_rows(self) -> bool:
        """Whether a gradient is cut along dim 0, is not permuted, and has elements."""
        return self.dim == 0 and self.order is None and self.flat.numel > 0

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a whole tensor, or a local shard, with its dims in memory order.

        A scalar becomes a vector of ``num_shards`` equal elements.
        """
        if self.dim is None:
            return tensor.expand(self.flat.shape)
        return tensor if self.order is None else tensor.permute(self.order)

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """View the first elements of a flat buffer as the whole tensor."""
        if self.dim is None:  # a scalar, or `flat.inner` scalars of `stacked`
            return buffer[: self.flat.inner].view(self.shape)
        return self._in_user_order(buffer[: self.flat.numel].view(self.flat.shape))

    def local(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        """View the first elements of a flat buffer as the local shard of ``rank``."""
        if self.dim is None:
            return self.whole(buffer)
        shape = self.flat.local_shape(rank)
        return self._in_user_order(buffer[: prod(shape)].view(shape))

    def shard_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View the rows of ``rank`` in a whole tensor."""
        if self.dim is None:
            return tensor
        layout = self.flat
        if _torch.is_user_subclass(tensor):
            # Subclasses implement chunk (as aten.split), because torch's fully_shard calls it. Few
            # of them implement narrow.
            shards = tensor.chunk(layout.num_shards, self.dim)
            plain = torch.empty(self.shape, device="meta").chunk(layout.num_shards, self.dim)
            got, expected = ([list(shard.shape) for shard in each] for each in (shards, plain))
            if got != expected:
                kind = type(tensor).__name__
                raise ExtensionError(
                    f"Expected split of {kind} to return shapes {expected}, got {got}"
                )
            if rank < len(shards):  # chunk returns no empty shards
                return shards[rank]
        return tensor.narrow(self.dim, layout.start(rank), layout.local_rows(rank))

    def padded_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return padded shards of a whole tensor, [num_shards, shard_numel]; a view if possible."""
        layout = self.flat
        elements = self.in_memory_order(tensor).reshape(-1)
        if layout.is_even and layout.gathers_in_place:
            return elements.view(layout.num_shards, layout.shard_numel)
        stack = tensor.new_zeros((layout.num_shards, layout.shard_numel))
        for whole, shards in matching_pieces(layout, elements, stack):
            shards.copy_(whole)
        return stack

    def new_zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a whole tensor of zeros, of the class and on the device of ``like``."""
        if self.order is None:
            return like.new_zeros(self.shape, dtype=dtype)
        return self.whole(like.new_zeros(self.flat.numel, dtype=dtype))

    def stacked(self, count: int) -> TensorLayout:
        """Return the layout of ``count`` such tensors, stacked along a new last dim."""
        flat = replace(self.flat, shape=(*self.flat.shape, count))
        order = None if self.order is None else (*self.order, len(self.shape))
        return replace(self, shape=(*self.shape, count), order=order, flat=flat)

    def _in_user_order(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return rows
        # The inverse of the permutation in `in_memory_order`.
        return rows.permute(sorted(range(rows.ndim), key=self.order.__getitem__))


def plan_tensor(tensor: torch.Tensor, dim: int | None, num_shards: int) -> TensorLayout:
    """Plan the layout of a tensor in flat buffers.

    Args:
        tensor: The tensor; only its shape and strides matter. If it is not dense in any order of
            its dims, the layout is contiguous.
        dim: The dim to cut; ``None`` for a scalar.
        num_shards: The number of shards.
    """
    shape = tuple(tensor.shape)
    if dim is None:
        return TensorLayout(shape, None, None, ParamLayout((num_shards,), 0, num_shards))
    by_stride = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if tensor.is_contiguous() or not tensor.permute(by_stride).is_contiguous():
        return TensorLayout(shape, dim, None, ParamLayout(shape, dim, num_shards))
    memory_shape, memory_dim = tuple(shape[axis] for axis in by_stride), by_stride.index(dim)
    return TensorLayout(shape, dim, by_stride, ParamLayout(memory_shape, memory_dim, num_shards))


def packing_alignment(dtypes: Iterable[torch.dtype], device: torch.device) -> int:
    """Return the alignment of packed shards, in elements of the narrowest dtype.

    Devices read and write fastest if shards begin at multiples of ``PACKED_ALIGNMENT_NBYTES``.
    """
    narrowest = min(dtype.itemsize for dtype in dtypes)
    return max(1, PACKED_ALIGNMENT_NBYTES // narrowest) if _torch.aligns(device) else 1


def matching_pieces(
    layout: ParamLayout, elements: torch.Tensor, shards: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair views of a whole parameter with views of its shards.

    Copying one side to the other converts between the two forms, for any sharded dim. The views
    contain no padding.

    Args:
        layout: The layout of the parameter.
        elements: The whole parameter, [numel] or longer.
        shards: Its padded shards, [num_shards, shard_numel].
    """
    num_full, per_shard = layout.num_full, layout.rows_per_shard
    whole = elements[: layout.numel].view(layout.outer, layout.num_rows, layout.inner)
    pieces = []
    if num_full:
        rows = whole[:, : num_full * per_shard]
        rows = rearrange(rows, "outer (shard row) inner -> shard outer row inner", shard=num_full)
        stacked = shards[:num_full].view(num_full, layout.outer, per_shard, layout.inner)
        pieces.append((rows, stacked))
    rest = layout.num_rows - num_full * per_shard
    if rest:
        numel = layout.outer * rest * layout.inner
        last = shards[num_full, :numel].view(layout.outer, rest, layout.inner)
        pieces.append((whole[:, -rest:], last))
    return pieces


Placements = tuple[Placement, ...]

Role = Literal["replicate", "shard"] | None

GradStage = Literal["sharded", "reduced_over_shards", "unreduced"]
"""The stage of a gradient's reduction, which determines its placements; see ParamPlacement."""


@dataclass(frozen=True)
class ParamPlacement:
    """Mesh and placements of the sharded parameter and of its gradient.

    Attributes:
        mesh: The mesh of the sharded DTensor.
        axes: For each mesh axis, the placement of the parameter, and the role of the axis, which is
            ``None`` if the axis is not data-parallel.
        unsharded_spec: The spec of the unsharded parameter; ``None`` if it is a plain tensor.
        unsharded_grad: For each axis of the mesh of the unsharded parameter, the placement to which
            :meth:`local_grad` redistributes the gradient; ``None`` to leave it as it is.
    """

    mesh: DeviceMesh
    axes: tuple[tuple[Placement, Role], ...]
    unsharded_spec: _torch.DTensorSpec | None = None
    unsharded_grad: tuple[Placement | None, ...] = ()

    @cached_property
    def sharded(self) -> Placements:
        """Placements of the parameter and of its reduced gradient."""
        return self._partial_over()

    @cached_property
    def reduced_over_shards(self) -> Placements:
        """Placements of a gradient that is reduced over the shards only."""
        return self._partial_over("replicate")

    @cached_property
    def unreduced(self) -> Placements:
        """Placements of a gradient that is not reduced at all."""
        return self._partial_over("replicate", "shard")

    def _partial_over(self, *roles: Role) -> Placements:
        return tuple(Partial("avg") if role in roles else place for place, role in self.axes)

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of an unsharded gradient, before it is cut into shards.

        Collective: redistributes a DTensor with other placements than those of the parameter, over
            the axes that are not data-parallel.
        """
        if self.unsharded_spec is None:
            return grad
        assert isinstance(grad, DTensor), type(grad)
        placements = tuple(
            current if placement is None else placement
            for current, placement in zip(grad.placements, self.unsharded_grad, strict=True)
        )
        if placements != grad.placements:
            grad = grad.redistribute(placements=placements)
        return _torch.waited(_torch.local_tensor(grad))


def plan_placement(
    name: str, param: torch.Tensor, dim: int | None, mesh: ShardMesh
) -> ParamPlacement:
    """Choose the mesh and placements of a parameter.

    Args:
        name: The name of the parameter in error messages.
        param: The parameter, a plain tensor or a DTensor.
        dim: The dim to shard; ``None`` to replicate the parameter.
        mesh: The data-parallel ranks.

    Raises:
        ValueError: If the parameter does not fit ``mesh``.
    """
    if not isinstance(param, DTensor):
        if not mesh.is_whole:
            raise ValueError(
                f"Expected parameter '{name}' to be a DTensor on the mesh that dp_mesh_dims "
                f"describes, got a plain {type(param).__name__}; distribute it first"
            )
        return ParamPlacement(mesh.mesh, _axes(mesh, dim))
    spec = _torch.spec_of(param)
    if mesh.dims is not None:
        return _on_full_mesh(name, spec, dim, mesh)
    joint_mesh, cause = None, None
    try:
        joint_mesh = _torch.concatenate_meshes([mesh.mesh, spec.mesh])
    except Exception as error:  # noqa: BLE001 - torch refuses parts of different meshes
        cause = error
    if joint_mesh is None or joint_mesh.device_type != spec.mesh.device_type:
        raise ValueError(
            f"Expected the mesh of the DTensor parameter '{name}' and the data-parallel mesh to "
            f"be parts of one mesh with named axes, got {spec.mesh} and {mesh.mesh}; build both "
            "by slicing one mesh, and pass its data-parallel axes, such as mesh['data']"
        ) from cause
    other_axes = ((placement, None) for placement in spec.placements)
    axes = *_axes(mesh, dim, _num_parts(spec, dim)), *other_axes
    return ParamPlacement(joint_mesh, axes, spec, spec.placements)


def _axes(
    mesh: ShardMesh, dim: int | None, num_parts: int = 1
) -> tuple[tuple[Placement, Role], ...]:
    """Return the placement and the role of each data-parallel axis.

    Args:
        mesh: The data-parallel ranks.
        dim: The dim to shard; ``None`` replicates.
        num_parts: The number of parts into which the other axes cut ``dim``.
    """
    replicate: tuple[Placement, Role] = (Replicate(), "replicate")
    shard: tuple[Placement, Role] = (_shard(dim, num_parts), "shard")
    axes = (replicate, mesh.replica_group), (shard, mesh.shard_group)
    return tuple(axis for axis, group in axes if group is not None)


def _shard(dim: int | None, num_parts: int) -> Placement:
    """Return the placement that shards ``dim``; ``Replicate`` without a dim.

    The placement is strided if other axes cut the dim into several parts (``num_parts``).
    """
    if dim is None:
        return Replicate()
    return Shard(dim) if num_parts == 1 else _torch.strided_shard(dim, num_parts)


def _num_parts(spec: _torch.DTensorSpec, dim: int | None, first_axis: int = 0) -> int:
    """Return the number of parts into which ``first_axis`` and later axes cut ``dim``."""
    pairs = [*zip(spec.placements, spec.mesh.shape, strict=True)][first_axis:]
    return prod(size for placement, size in pairs if _torch.shards_dim(placement, dim))


def _on_full_mesh(
    name: str, spec: _torch.DTensorSpec, dim: int | None, mesh: ShardMesh
) -> ParamPlacement:
    """Place a DTensor parameter on a mesh that includes the data-parallel axes.

    Several sharding axes are flattened into one axis.
    """
    full, dims = spec.mesh, mesh.dims
    assert dims is not None and full.mesh_dim_names is not None
    if full != mesh.full_mesh:
        raise ValueError(
            f"Expected parameter '{name}' on the mesh that was passed to fully_shard, "
            f"{mesh.full_mesh}, got one on {full}; if the parameter is on only some axes of that "
            "mesh, pass only the data-parallel axes, such as mesh['data'], without dp_mesh_dims"
        )
    roles: dict[str, Role] = dict.fromkeys(dims.shard_names, "shard")
    roles |= dict.fromkeys(dims.replicate_names, "replicate")
    submeshes: list[DeviceMesh] = []
    axes: list[tuple[Placement, Role]] = []
    unsharded_grad: list[Placement | None] = []
    for index, axis_name in enumerate(full.mesh_dim_names):
        placement, role = spec.placements[index], roles.get(axis_name)
        if role is not None and not placement.is_replicate():
            raise ValueError(
                f"Expected parameter '{name}' to be replicated over the data-parallel axis "
                f"'{axis_name}', got {placement}"
            )
        unsharded_grad.append(placement if role is None else None)
        if axis_name in dims.shard_names[1:]:
            continue  # flattened into the first sharding axis
        if role == "shard":
            # The axes to the right cut the dim first, and this axis cuts each of their parts.
            placement = _shard(dim, _num_parts(spec, dim, index + 1))
        names = dims.shard_names if role == "shard" else (axis_name,)
        submeshes.append(_torch.flat_axis(full, names))
        axes.append((placement, role))
    is_flattened = len(axes) < full.ndim
    joint_mesh = _torch.concatenate_meshes(submeshes) if is_flattened else full
    return ParamPlacement(joint_mesh, tuple(axes), spec, tuple(unsharded_grad))
