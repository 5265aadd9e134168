"""Every private name of torch that the library uses, each behind a name of its own.

What changes between torch versions is absorbed here; nothing else imports a private name.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import SUPPORTED_NODES

__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "accumulate_node",
    "all_gather_flat",
    "average_is_supported",
    "backend_allocator",
    "backend_name",
    "call_grad_hooks",
    "call_post_accumulate_grad_hooks",
    "chunk_cat_into",
    "concatenate_meshes",
    "current_backward",
    "cut",
    "divide_all_",
    "flat_axis",
    "fresh_storage_view",
    "from_local",
    "from_local_at_start",
    "has_grad_hooks",
    "is_batch_norm",
    "is_executing",
    "is_wrapper_subclass",
    "local_tensor",
    "make_spec",
    "map_registered_container",
    "module_call_frame",
    "on_backward_end",
    "preserved_version",
    "reduce_scatter_flat",
    "registered_children",
    "set_local_tensor",
    "set_versions",
    "shards_dim",
    "share_hooks",
    "spec_of",
    "spec_with_dtype",
    "strided_shard",
    "symmetric_memory_of_nccl",
    "waited",
    "will_run",
]


# DTensor ------------------------------------------------------------------------------------


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the very local tensor of a DTensor; ``to_local()`` gives a fresh view."""
    return cast(DTensor, tensor)._local_tensor


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


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape."""
    cast(DTensor, tensor)._local_tensor = local


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


def from_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor without checks, copies or communication (2 us, not 25)."""
    return DTensor(local, spec, requires_grad=False)


def cut(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Return this rank's part of a full tensor that all ranks hold. Collective: none."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)._local_tensor


def from_local_at_start(tensor: DTensor) -> DTensor:
    """Return a DTensor of the same local tensor that reports storage offset 0."""
    local = tensor._local_tensor
    if local.storage_offset() == 0:
        return tensor
    shape_only = local.as_strided(local.shape, local.stride(), 0)
    wrapped = from_local(shape_only, tensor._spec)
    wrapped._local_tensor = local
    return wrapped


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is a subclass made of inner tensors (``__tensor_flatten__``)."""
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


# Meshes -------------------------------------------------------------------------------------


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh of one axis, or of several flattened. Collective: makes its group."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the axes of several parts of one mesh, in order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


# Autograd -----------------------------------------------------------------------------------


def current_backward() -> int:
    """Return the id of the running backward, -1 outside of one."""
    return torch._C._current_graph_task_id()


def will_run(node: Node) -> bool:
    """Tell whether the running backward will execute ``node``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of autograd.grad: its gradient is returned, not accumulated
        return False


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished; drop it if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulate_node(param: nn.Parameter) -> Node:
    """Return the node that accumulates into the ``grad`` of a leaf."""
    with torch.inference_mode(False):
        return get_gradient_edge(param).node


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let the hooks of a leaf, and the handles that remove them, act on another leaf too."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def has_grad_hooks(param: torch.Tensor) -> bool:
    """Tell whether users put hooks for its gradient on a leaf."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def call_grad_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through what ``register_hook`` put on a leaf; return what comes out."""
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def call_post_accumulate_grad_hooks(param: torch.Tensor) -> None:
    """Call what ``register_post_accumulate_grad_hook`` put on a leaf."""
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)


# Modules ------------------------------------------------------------------------------------


def module_call_frame() -> FrameType | None:
    """Return the frame of the innermost running ``Module.__call__``, which outlives its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame


def is_executing(frame: FrameType) -> bool:
    """Tell whether ``frame`` has not ended, on whatever thread; lets go of its locals if it has."""
    try:
        frame.clear()
    except RuntimeError:  # an executing frame cannot be cleared
        return True
    return False


def is_batch_norm(module: nn.Module) -> bool:
    """Tell whether a module is a batch norm of any number of dims, synchronized or not."""
    return isinstance(module, _BatchNorm)


# Containers ---------------------------------------------------------------------------------


def registered_children(value: Any) -> Sequence[Any]:
    """Return what a container holds whose class is registered as a node of trees, else nothing."""
    node = SUPPORTED_NODES.get(type(value))
    return () if node is None else list(node.flatten_fn(value)[0])


def map_registered_container(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to what a registered container holds; if nothing changes, return itself."""
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        return value
    children, context = node.flatten_fn(value)
    changed = [change(child) for child in children]
    if all(new is old for new, old in zip(changed, children, strict=True)):
        return value
    return node.unflatten_fn(changed, context)


# Tensors ------------------------------------------------------------------------------------


def fresh_storage_view(storage_of: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """View the storage of ``storage_of``, shaped as ``like``, with a version counter of its own.

    Writing the storage through another tensor does not count as a change of this one, so autograd
    accepts saved views of it after they have been freed and gathered again.
    """
    with torch.inference_mode(False), torch.no_grad():
        view = torch.empty(0, dtype=storage_of.dtype, device=storage_of.device)
        return view.set_(storage_of.untyped_storage(), offset, like.shape, like.stride())


def preserved_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Leave the version counter of ``tensor`` as it was, whatever is written in between."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set version counters; autograd refuses saved tensors whose counter has moved."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def chunk_cat_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Cut each tensor along dim 0 into ``len(out)`` padded chunks; row i gets all chunks i.

    One fused kernel that pads with zeros and casts to the dtype of ``out``.
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=out.shape[0], out=out)


def divide_all_(tensors: list[torch.Tensor], divisor: float) -> None:
    """Divide tensors in place, in one kernel where the device has one."""
    torch._foreach_div_(tensors, divisor)


# c10d ---------------------------------------------------------------------------------------

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]

_ALL_GATHER = (
    "all_gather_single_coalesced"
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)
_REDUCE_SCATTER = (
    "reduce_scatter_single_coalesced"
    if hasattr(dist.ProcessGroup, "reduce_scatter_single_coalesced")
    else "reduce_scatter_tensor_coalesced"
)


def all_gather_flat(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """All-gather each input into its output, all in one launch."""
    return cast(dist.Work, getattr(group, _ALL_GATHER)(outputs, inputs))


def reduce_scatter_flat(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup,
    op: Any,
) -> dist.Work:
    """Reduce-scatter each input into its output, all in one launch."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return cast(dist.Work, getattr(group, _REDUCE_SCATTER)(outputs, inputs, options))


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend that serves ``device`` in ``group``: gloo, nccl, fake, threaded, ..."""
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
        name = group._get_backend(device).name()
        if name not in ("custom", "undefined"):
            return str(name).lower()
    return str(dist.get_backend(group)).lower()


def average_is_supported(backend: str) -> bool:
    """Tell whether ``ReduceOp.AVG`` exists in a backend's reduce-scatter."""
    return backend in ("nccl", "xccl", "threaded", "fake")


def backend_allocator(group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return what allocates memory that a backend likes best; ``None`` if it has no opinion."""
    backend = group._get_backend(device)
    with contextlib.suppress(AttributeError, RuntimeError):
        if backend.supports_tensor_alloc(device):
            return lambda shape, dtype, where: backend.allocate_tensor(
                math.prod(shape), dtype=dtype, device=where
            ).view(tuple(shape))
    return None


def symmetric_memory_of_nccl() -> tuple[Allocate, Callable[[torch.Tensor, dist.ProcessGroup], Any]]:
    """Return what allocates symmetric memory, and what makes it known to a process group."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    return allocate, lambda tensor, group: symmetric.rendezvous(tensor, group=group.group_name)
