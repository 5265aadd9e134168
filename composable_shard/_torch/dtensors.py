"""DTensors, their meshes and placements, and tensor subclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from operator import attrgetter
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_shard._torch.tensors import without_overrides


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local tensor object of a DTensor; ``to_local()`` would return a fresh view."""
    return cast(DTensor, tensor)._local_tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; return any other tensor as it is."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


local_tensors: Callable[..., Iterator[Tensor]] = partial(map, attrgetter("_local_tensor"))
"""Returns the local tensor objects of DTensors."""


specs_of: Callable[..., Iterator[DTensorSpec]] = partial(map, attrgetter("_spec"))
"""Returns the specs of DTensors; raises ``AttributeError`` for any other tensor."""


def spec_of(tensor: Tensor) -> DTensorSpec:
    """Return the spec of a DTensor: mesh, placements, global shape, stride and dtype."""
    return cast(DTensor, tensor)._spec


def waited(tensor: Tensor) -> Tensor:
    """Wait for the functional collective that makes a local tensor; return the tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def strided_shard(dim: int, num_parts: int) -> Placement:
    """Shard a dim that other axes have split into ``num_parts`` parts, within each part."""
    return cast(Placement, _StridedShard(dim, split_factor=num_parts))


def shards_dim(placement: Placement, dim: int | None) -> bool:
    """Return whether a placement shards ``dim``."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def num_parts_of_strided(placement: Placement) -> int | None:
    """Return the number of parts that a strided placement shards; ``None`` for a plain one."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def with_dim(placement: Placement, dim: int) -> Placement:
    """Return the same placement for another dim."""
    num_parts = num_parts_of_strided(placement)
    return Shard(dim) if num_parts is None else strided_shard(dim, num_parts)


def split(numbers: Tensor, placement: Placement, num_parts: int) -> list[Tensor]:
    """Split a 1-D tensor into the parts that the ranks of an axis hold.

    Hazard: torch's public functions return only the part of the calling rank, so this uses a
    private one. Guard: its parts are those that the ranks hold. Test:
    ``test_all_ranks_know_what_each_holds``.
    """
    assert isinstance(placement, (Shard, _StridedShard))
    parts, _ = placement._split_tensor(numbers, num_parts, with_padding=False, contiguous=False)
    return parts


def set_local_tensor(tensor: Tensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape."""
    cast(DTensor, tensor)._local_tensor = local


def relocate(tensor: Tensor, local: Tensor, spec: DTensorSpec) -> None:
    """Move a DTensor to other ranks or placements; its global shape and dtype stay.

    Hazard: torch caches the sharding of ops by spec. Guard: the DTensor gets a new spec, and the
    old one is not changed. Test: ``test_training_goes_on_as_from_a_checkpoint``.
    """
    inner = cast(DTensor, tensor)
    inner._local_tensor, inner._spec = local, spec


def parameter_of(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of a tensor; a DTensor keeps its mesh object.

    Hazard: torch treats equal meshes as one, so the parameter may get a mesh with other process
    groups, perhaps lost ones. Guard: it gets the spec of the tensor. Test:
    ``test_equal_meshes_keep_their_process_groups``.
    """
    made = nn.Parameter(tensor, requires_grad=requires_grad)
    if isinstance(tensor, DTensor):
        cast(DTensor, made)._spec = tensor._spec
    return made


def class_in_memory(tensor: Tensor) -> type[Tensor] | None:
    """Return the user's class of a tensor with plain memory; ``None`` for all other tensors."""
    return None if _is_of_torch(tensor) or is_subclass(tensor) else type(tensor)


def _is_of_torch(tensor: Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def parameter_of_class(tensor: Tensor, kind: type[Tensor], requires_grad: bool) -> nn.Parameter:
    """Make a parameter of a class (see :func:`class_in_memory`) from a plain tensor."""
    with torch.no_grad():
        made = tensor.detach().as_subclass(kind)
    with without_overrides():
        made.requires_grad_(requires_grad)
    if not isinstance(made, nn.Parameter):
        made._is_param = True  # torch's mark on parameters of classes not derived from Parameter
    return cast(nn.Parameter, made)


_specs: WeakValueDictionary[tuple[object, ...], DTensorSpec] = WeakValueDictionary()


def make_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    """Return the spec of a DTensor with a global shape, stride and dtype.

    The layers of a model often have parameters of equal shapes: they share one object, which takes
    less memory, and stays in the cache of the processor. A spec in use keeps its mesh alive, so no
    other mesh has the same id.
    """
    key = id(mesh), placements, meta
    if (spec := _specs.get(key)) is None:
        spec = _specs[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of the same DTensor in another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, meta._replace(dtype=dtype))


# The constructor itself, without torch's guard against tracing.
_new_dtensor: Callable[..., DTensor] = getattr(Tensor, "_dtensor__new__", DTensor.__new__)


from_local = partial(_new_dtensor, DTensor, requires_grad=False)
"""Wraps a local tensor without checks, copies or communication (1 us, not 25)."""


def local_like(param: Tensor, local: Tensor) -> DTensor:
    """Wrap ``local``, of any dtype, in a DTensor with the mesh and placements of ``param``."""
    return from_local(local, spec_with_dtype(spec_of(param), local.dtype))


def cut(full: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Return this rank's shard of a full tensor that all ranks hold. Collective: none."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)._local_tensor


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a subclass made of inner tensors (``__tensor_flatten__``)."""
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def is_subclass(tensor: Tensor) -> bool:
    """Return whether the class of ``tensor`` defines its own operations."""
    plain = Tensor.__torch_dispatch__
    return is_wrapper_subclass(tensor) or type(tensor).__torch_dispatch__ is not plain


def is_user_subclass(tensor: Tensor) -> bool:
    """Return the same, except ``False`` for torch's own classes, such as fake tensors."""
    return is_wrapper_subclass(tensor) or (is_subclass(tensor) and not _is_of_torch(tensor))


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh of one axis, or of several flattened. Collective: makes its group."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def last_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh of the last axis. Collective: none."""
    return mesh if mesh.ndim == 1 else mesh[cast(tuple[str, ...], mesh.mesh_dim_names)[-1]]


def cloned(tensor: Tensor) -> Tensor:
    """Copy a tensor bit by bit, since ``clone`` of a quantized subclass may quantize it again.

    A class that cannot be rebuilt from its inner tensors is copied into a tensor of zeros, as
    torch's ``fully_shard`` does.
    """
    if not is_subclass(tensor):
        return tensor.clone()
    if is_wrapper_subclass(tensor) and _rebuilds(type(tensor)):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: cloned(getattr(tensor, name)) for name in names}
        rebuilt: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, tensor.shape, tensor.stride()
        )
        if type(rebuilt) is type(tensor):
            return rebuilt
    copied = tensor.new_zeros(tensor.shape)
    copied.copy_(tensor)
    return copied


@lru_cache
def _rebuilds(kind: type) -> bool:
    """Return whether ``__tensor_unflatten__`` of a class has the signature of torch's protocol."""
    signature = inspect.signature(kind.__tensor_unflatten__)  # type: ignore[attr-defined]
    try:
        signature.bind("inner", "context", "shape", "stride")
    except TypeError:
        return False
    return True


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Concatenate the axes of several submeshes of one mesh, in order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


def let_foreach_zero_any_placement() -> None:
    """Let ``torch._foreach_zero_`` fill DTensors of any placements, also ``Partial`` ones.

    Torch refuses ``Partial`` ones there, but accepts them in ``zero_``. If all ranks hold zeros,
    any reduction of them is zero.
    """
    handlers: dict[object, object] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    handlers.setdefault(torch.ops.aten._foreach_zero_.default, _foreach_zero)


def _foreach_zero(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    tensors = cast(list[Tensor], args[0])
    torch._foreach_zero_([t._local_tensor if isinstance(t, DTensor) else t for t in tensors])
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def clear_sharding_cache() -> None:
    """Clear this thread's cache of the sharding of DTensor ops.

    Hazard: at the end of a thread, DTensor frees that cache and its tensors under a lock. Another
    thread that waits for the lock and holds the interpreter's lock waits for ever. Guard: the cache
    is cleared before. No test shows it every time; ``tests/subclasses/test_errors.py`` hung in 1 of
    7 runs.
    """
    torch._C._clear_DTensor_sharding_propagator_cache()


def leaves(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor subclass; for a plain tensor, the tensor itself.

    For a subclass without memory and without ``__tensor_flatten__``, they are in its attributes.
    """
    if is_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [leaf for name in names for leaf in leaves(getattr(tensor, name))]
    if not is_subclass(tensor) or _has_memory(tensor):
        return [tensor]
    inner = [value for value in vars(tensor).values() if isinstance(value, Tensor)]
    return [leaf for value in inner for leaf in leaves(value)]


def _has_memory(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # fake tensors, too
        return True
    try:
        storage.data_ptr()
    except RuntimeError:  # a wrapper
        return False
    return True
