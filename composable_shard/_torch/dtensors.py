"""DTensors, their meshes and placements, and tensor subclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_shard._torch.tensors import without_overrides

_local_tensor_of = attrgetter("_local_tensor")
_spec_of = attrgetter("_spec")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the very local tensor of a DTensor; ``to_local()`` gives a fresh view."""
    return cast(DTensor, tensor)._local_tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: the local one of a DTensor, any other itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


local_tensors: Callable[[Iterable[torch.Tensor]], Iterator[torch.Tensor]]
local_tensors = partial(map, _local_tensor_of)
"""Returns the very local tensors of some DTensors."""


def specs_of(tensors: Iterable[Any]) -> Iterator[DTensorSpec]:
    """Return what describes each DTensor; ``AttributeError`` for what is none."""
    return map(_spec_of, tensors)


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Return mesh, placements and global shape of a DTensor."""
    return cast(DTensor, tensor)._spec


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return a local tensor once the functional collective that makes it is done."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def strided_shard(dim: int, num_parts: int) -> Placement:
    """Shard a dim of which other axes hold ``num_parts`` parts, each within its part."""
    return cast(Placement, _StridedShard(dim, split_factor=num_parts))


def shards_dim(placement: Placement, dim: int) -> bool:
    """Tell whether a placement cuts ``dim``."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def num_parts_of_strided(placement: Placement) -> int | None:
    """Return of how many parts of a tensor a placement cuts each; ``None`` of one that is plain."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def with_dim(placement: Placement, dim: int) -> Placement:
    """Return a placement that cuts ``dim`` as the given one cuts its own."""
    if isinstance(placement, _StridedShard):
        return strided_shard(dim, int(placement.split_factor))
    return Shard(dim)


def split(numbers: torch.Tensor, placement: Placement, num_parts: int) -> list[torch.Tensor]:
    """Cut a tensor of one dim into what each rank of an axis holds of it.

    Hazard: torch says this of the rank that asks, and no public function of another one. Guard:
    what each rank is said to hold is what it has. Test: ``test_all_ranks_know_what_each_holds``.
    """
    assert isinstance(placement, (Shard, _StridedShard))
    parts, _ = placement._split_tensor(numbers, num_parts, with_padding=False, contiguous=False)
    return parts


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape."""
    cast(DTensor, tensor)._local_tensor = local


def relocate(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Let a DTensor lie on other ranks, or otherwise; it has the same global shape and dtype.

    Hazard: torch caches how an op is sharded by specs, which are compared and hashed. Guard: it is
    given another spec, and the one that it had is left as it is. Test:
    ``test_training_goes_on_as_from_a_checkpoint``.
    """
    inner = cast(DTensor, tensor)
    inner._local_tensor, inner._spec = local, spec


def parameter_of(tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of a tensor; that of a DTensor keeps its very mesh.

    Hazard: torch takes equal meshes for one, and what it makes of a DTensor may have a mesh of
    other process groups, perhaps lost ones. Test: ``test_equal_meshes_keep_their_process_groups``.
    """
    made = nn.Parameter(tensor, requires_grad=requires_grad)
    if isinstance(tensor, DTensor):
        cast(DTensor, made)._spec = tensor._spec
    return made


def class_in_memory(tensor: torch.Tensor) -> type[torch.Tensor] | None:
    """Return the class of a tensor with memory like any other; ``None`` if torch's own, or else."""
    return None if _is_of_torch(tensor) or is_subclass(tensor) else type(tensor)


def _is_of_torch(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def parameter_of_class(
    tensor: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool
) -> nn.Parameter:
    """Make a parameter of a class, see :func:`class_in_memory`, of a plain tensor."""
    with torch.no_grad():
        made = tensor.detach().as_subclass(kind)
    with without_overrides():
        made.requires_grad_(requires_grad)
    if not isinstance(made, nn.Parameter):
        made._is_param = True  # as torch marks one of a class that is not derived from Parameter
    return cast(nn.Parameter, made)


def make_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    """Describe a DTensor of a global shape, stride and dtype."""
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Describe the same DTensor in another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype)
    )


# the constructor proper; around it there is only a guard against being traced
_new_dtensor: Callable[..., DTensor] = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)


from_local = partial(_new_dtensor, DTensor, requires_grad=False)
"""Wraps a local tensor without checks, copies or communication (1 us, not 25)."""


def local_like(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return ``local``, of any dtype, as the DTensor that it is this rank's shard of, as of one."""
    return from_local(local, spec_with_dtype(spec_of(param), local.dtype))


def cut(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Return this rank's part of a full tensor that all ranks hold. Collective: none."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)._local_tensor


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is a subclass made of inner tensors (``__tensor_flatten__``)."""
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def is_subclass(tensor: torch.Tensor) -> bool:
    """Tell whether a class decides itself what operations on ``tensor`` do."""
    plain = torch.Tensor.__torch_dispatch__
    return is_wrapper_subclass(tensor) or type(tensor).__torch_dispatch__ is not plain


def is_subclass_of_user(tensor: torch.Tensor) -> bool:
    """Tell the same, but for classes that torch makes by itself, such as fake tensors."""
    return is_wrapper_subclass(tensor) or (is_subclass(tensor) and not _is_of_torch(tensor))


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh of one axis, or of several flattened. Collective: makes its group."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def last_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh of the last axis. Collective: none."""
    return mesh if mesh.ndim == 1 else mesh[cast(tuple[str, ...], mesh.mesh_dim_names)[-1]]


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor bit by bit; to clone a quantized subclass may mean to quantize it again.

    A class that cannot be rebuilt as torch's compiler does it is copied as torch's ``fully_shard``
    does: into one of zeros.
    """
    if not is_subclass(tensor):
        return tensor.clone()
    if is_wrapper_subclass(tensor) and _rebuilds(type(tensor)):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: cloned(getattr(tensor, name)) for name in names}
        rebuilt: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, tensor.shape, tensor.stride()
        )
        if type(rebuilt) is type(tensor):
            return rebuilt
    copied = tensor.new_zeros(tensor.shape)
    copied.copy_(tensor)
    return copied


@lru_cache
def _rebuilds(kind: type) -> bool:
    """Tell whether a class takes the arguments with which it is rebuilt from inner tensors."""
    try:
        inspect.signature(kind.__tensor_unflatten__).bind(  # type: ignore[attr-defined]
            "inner", "context", "shape", "stride"
        )
    except (TypeError, ValueError):
        return False
    return True


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the axes of several parts of one mesh, in order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


def let_foreach_zero_any_placement() -> None:
    """Let ``torch._foreach_zero_`` fill DTensors of any placements, ``Partial`` ones among them.

    Torch refuses those, as if zeros were a value of their own on each rank, though ``zero_`` of one
    tensor takes them. Zeros everywhere are zero, whatever is still to be reduced.
    """
    handlers: dict[object, object] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    handlers.setdefault(torch.ops.aten._foreach_zero_.default, _foreach_zero)


def _foreach_zero(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    tensors = cast(list[torch.Tensor], args[0])
    torch._foreach_zero_([t._local_tensor if isinstance(t, DTensor) else t for t in tensors])
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def clear_sharding_cache() -> None:
    """Forget how DTensor ops of this thread were sharded before.

    Hazard: DTensor frees that when the thread ends, tensors and all, under a lock. A thread that
    waits for the lock meanwhile, with the interpreter's, waits for ever. Guard: it is freed before.
    Test: none shows it each time; threads of ``tests/subclasses/test_errors.py`` did, 1 in 7.
    """
    torch._C._clear_DTensor_sharding_propagator_cache()


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor subclass is made of; of a plain one, itself.

    A subclass that has no memory and does not say what it is made of is made of its attributes.
    """
    if is_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [leaf for name in names for leaf in leaves(getattr(tensor, name))]
    if not is_subclass(tensor) or _has_memory(tensor):
        return [tensor]
    inner = [value for value in vars(tensor).values() if isinstance(value, torch.Tensor)]
    return [leaf for value in inner for leaf in leaves(value)]


def _has_memory(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # that of a fake tensor, too
        return True
    try:
        storage.data_ptr()
    except RuntimeError:  # what torch says of a tensor that is a wrapper
        return False
    return True
